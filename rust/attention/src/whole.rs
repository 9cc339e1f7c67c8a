//! Attention over caches of int8 in whole numbers.
//!
//! The numbers of a cache are whole; those that they meet are made so. A row of singles (a query, or the weights that a
//! row has in a span) becomes whole numbers of up to [`digits::MOST`] times a step: `number = whole * step`, each in
//! two signed digits of a byte. Products and sums are then exact, so no order of additions changes a bit, and any
//! number of rows may be computed in any tiles.
//!
//! The instruction multiplies unsigned bytes by signed ones. So the cache's bytes are taken 128 larger, which is turning
//! their highest bit, and that is taken away at the end: `Σ q·c = Σ q·(c + 128) - 128·Σ q`.
//!
//! Sums have 32 bits and wrap. They are right as long as the result itself fits: the magnitudes are at most
//! `128 * MOST` times the number of products, so up to [`MOST_VALUES`] of these can be summed.

pub(crate) mod digits;
pub(crate) mod score;
pub(crate) mod sum;

#[cfg(test)]
mod tests;

use crate::SPAN;

/// The longest row of keys.
pub(crate) const MOST_VALUES: usize = 512;

const _: () = assert!(128 * digits::MOST as i64 * MOST_VALUES as i64 <= i32::MAX as i64);
const _: () = assert!(SPAN <= MOST_VALUES);
