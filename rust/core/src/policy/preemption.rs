//! How a victim is brought back: computed again, or copied out and in.

use crate::error::{Error, Result};

/// What the operator allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreemptionMode {
    /// Whatever costs less.
    Auto,
    /// Always compute again.
    Recompute,
    /// Copy, wherever the host has room.
    Swap,
}

impl PreemptionMode {
    /// All modes, each at its own number.
    pub(crate) const ALL: [Self; 3] = [Self::Auto, Self::Recompute, Self::Swap];

    /// The mode with this name.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an unknown name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "recompute" => Ok(Self::Recompute),
            "swap" => Ok(Self::Swap),
            _ => Err(Error::config("preemption", format!("'{name}'"), "auto, recompute or swap")),
        }
    }
}

/// What was measured on the machine. Zeros: nothing was.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// Seconds to compute one token of a prompt.
    pub seconds_per_token: f64,
    /// Seconds to copy one block out, or in.
    pub seconds_per_block: f64,
}

impl Costs {
    /// Checks both.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] with the first that is no time.
    pub fn validate(self) -> Result<()> {
        for (field, seconds) in
            [("seconds_per_token", self.seconds_per_token), ("seconds_per_block", self.seconds_per_block)]
        {
            if !(0.0..f64::INFINITY).contains(&seconds) {
                return Err(Error::config(field, seconds, "a finite number of seconds, at least 0"));
            }
        }
        Ok(())
    }
}

/// What a victim loses, and what the host could keep of it.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// Tokens that were computed.
    pub num_tokens: usize,
    /// Blocks that hold them.
    pub num_blocks: usize,
    /// Host blocks that are free.
    pub free_host_blocks: usize,
}

/// Whether a victim is copied to the host rather than computed again.
pub fn swaps(mode: PreemptionMode, costs: Costs, loss: Loss) -> bool {
    if loss.num_tokens == 0 || loss.num_blocks > loss.free_host_blocks {
        return false;
    }
    let copying = 2.0 * costs.seconds_per_block * loss.num_blocks as f64;
    let computing = costs.seconds_per_token * loss.num_tokens as f64;
    match mode {
        PreemptionMode::Recompute => false,
        PreemptionMode::Swap => true,
        PreemptionMode::Auto => copying < computing,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LOSS: Loss = Loss { num_tokens: 160, num_blocks: 10, free_host_blocks: 10 };

    #[test]
    fn a_cost_that_is_no_time_is_refused_by_name() {
        let costs = Costs { seconds_per_token: 0.0, seconds_per_block: 1.0 };
        assert_eq!(costs.validate(), Ok(()));
        for seconds in [-1.0, f64::NAN, f64::INFINITY] {
            let (token, block) = (
                Costs { seconds_per_token: seconds, ..costs },
                Costs { seconds_per_block: seconds, ..costs },
            );
            for (costs, field) in [(token, "seconds_per_token"), (block, "seconds_per_block")] {
                let error = costs.validate().unwrap_err().to_string();
                let allowed = "allowed is a finite number of seconds, at least 0";
                assert_eq!(error, format!("{field} is {seconds}: {allowed}"));
            }
        }
    }

    #[test]
    fn a_host_without_room_falls_back_to_computing() {
        let full = Loss { free_host_blocks: 9, ..LOSS };
        assert!(swaps(PreemptionMode::Swap, Costs::default(), LOSS));
        assert!(!swaps(PreemptionMode::Swap, Costs::default(), full));
    }

    #[test]
    fn auto_takes_what_costs_less() {
        let costs = Costs { seconds_per_token: 1e-4, seconds_per_block: 1e-4 };
        assert!(swaps(PreemptionMode::Auto, costs, LOSS));
        assert!(!swaps(PreemptionMode::Auto, Costs { seconds_per_block: 1e-3, ..costs }, LOSS));
        assert!(!swaps(PreemptionMode::Auto, Costs::default(), LOSS), "nothing was measured");
    }

    #[test]
    fn nothing_computed_is_nothing_to_copy() {
        let nothing = Loss { num_tokens: 0, num_blocks: 0, ..LOSS };
        assert!(!swaps(PreemptionMode::Swap, Costs::default(), nothing));
    }
}
