//! An outcome's numbers by name.

use pykv_core::{Error, Result};

use super::{Outcome, Point, Served};

impl Outcome {
    /// All totals.
    pub fn totals(&self) -> [(&'static str, f64); 20] {
        let lookups = self.lookups;
        [
            ("refused", self.refused as f64),
            ("cut", self.cut as f64),
            ("cut_tokens", self.cut_tokens as f64),
            ("queried_tokens", self.queried_tokens as f64),
            ("hit_tokens", self.hit_tokens as f64),
            ("steps", self.steps as f64),
            ("preempting_steps", self.preempting_steps as f64),
            ("computed_tokens", self.computed_tokens as f64),
            ("seconds", self.seconds),
            ("decode_reserved_slots", self.decode_reserved_slots as f64),
            ("decode_held_slots", self.decode_held_slots as f64),
            ("max_running", self.max_running as f64),
            ("swapped_out_blocks", self.swapped_out_blocks as f64),
            ("swapped_in_blocks", self.swapped_in_blocks as f64),
            ("total_slots", self.total_slots as f64),
            ("hit", lookups.hit as f64),
            ("never_seen", lookups.never_seen as f64),
            ("evicted", lookups.evicted as f64),
            ("not_yet_computed", lookups.not_yet_computed as f64),
            ("last", lookups.last as f64),
        ]
    }
}

impl Served {
    /// How to get a field by name.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an unknown name.
    pub fn column(name: &str) -> Result<fn(&Self) -> f64> {
        Ok(match name {
            "arrival" => |served| served.arrival,
            "started" => |served| served.started,
            "first_token" => |served| served.first_token,
            "ended" => |served| served.ended,
            "output_tokens" => |served| served.output_tokens as f64,
            "cached_tokens" => |served| served.cached_tokens as f64,
            "preemptions" => |served| served.pressure.preemptions as f64,
            "recomputed_tokens" => |served| served.pressure.recomputed_tokens as f64,
            "swapped_blocks" => |served| served.pressure.swapped_blocks as f64,
            "stalled_seconds" => |served| served.pressure.stalled_seconds,
            _ => return Err(Error::config("column", name, "a field of a served request")),
        })
    }
}

impl Point {
    /// How to get a field by name.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for an unknown name.
    pub fn column(name: &str) -> Result<fn(&Self) -> f64> {
        Ok(match name {
            "start" => |point| point.start,
            "seconds" => |point| point.seconds,
            "running" => |point| point.running,
            "waiting" => |point| point.waiting,
            "reserved_slots" => |point| point.reserved_slots,
            "held_tokens" => |point| point.held_tokens,
            "cached_slots" => |point| point.cached_slots,
            "broken_slots" => |point| point.broken_slots,
            "computed_tokens" => |point| point.computed_tokens,
            _ => return Err(Error::config("column", name, "a field of a point in time")),
        })
    }
}
