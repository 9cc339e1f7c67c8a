//! Whether the memory for large tables is there, asked before they are made: what fails later ends the process.

use crate::error::{Error, Result};

/// Asks for so many bytes at once and gives them back.
///
/// # Errors
/// [`Error::OutOfMemory`] if the system does not give them.
pub(crate) fn check_memory(what: &'static str, count: usize, bytes_each: usize) -> Result<()> {
    let bytes = count.saturating_mul(bytes_each);
    let mut probe: Vec<u8> = Vec::new();
    probe.try_reserve_exact(bytes).map_err(|_| Error::OutOfMemory { what, bytes })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_had_is_told_with_its_size() {
        assert_eq!(check_memory("a table", 1 << 10, 8), Ok(()));
        let error = check_memory("a table", 1 << 30, 1 << 33).unwrap_err();
        assert!(
            error.to_string().starts_with("a table needs 9223372036854775808 bytes of memory"),
            "{error}"
        );
    }
}
