//! Who comes first.

use crate::error::{Error, Result};

/// The order in which waiting requests start; within one rank the older request comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueOrder {
    /// As they came.
    Fcfs,
    /// By the priority that the caller gave, the lowest number first.
    Priority,
    /// Whoever finds most of its prompt in the cache, with a bound on how often a request is passed.
    LongestPrefix,
    /// Fair shares of tokens between tenants, whoever sends how much.
    FairShare,
}

impl QueueOrder {
    /// All orders, each at its own number.
    pub(crate) const ALL: [Self; 4] = [Self::Fcfs, Self::Priority, Self::LongestPrefix, Self::FairShare];

    /// The order with this name.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an unknown name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "fcfs" => Ok(Self::Fcfs),
            "priority" => Ok(Self::Priority),
            "longest_prefix" => Ok(Self::LongestPrefix),
            "fair_share" => Ok(Self::FairShare),
            _ => Err(Error::config(
                "queue_order",
                format!("'{name}'"),
                "fcfs, priority, longest_prefix or fair_share",
            )),
        }
    }
}

/// A priority as a rank: the lowest number first.
pub fn priority_rank(priority: i32) -> u64 {
    (i64::from(priority) - i64::from(i32::MIN)) as u64
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_lower_number_ranks_first() {
        assert!(priority_rank(-1) < priority_rank(0));
        assert!(priority_rank(i32::MIN) < priority_rank(i32::MAX));
    }
}
