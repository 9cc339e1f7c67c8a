"""The engine: the step loop over scheduler, model and sampler, and its asynchronous face."""
