"""Files of request traces, in the forms that are public."""
