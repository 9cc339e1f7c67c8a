//! Scatters a step's keys and values into the caches.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::InstructionSet;
use crate::quantize::{Row, RowWriter};
use crate::view::{ActivationView, CacheView, Format, Scales, Side};
use crate::{Attention, Error};

/// The bytes below which one more thread is not worth its waking.
const THREAD_BYTES: usize = 1 << 18;

/// Everything that one call of [`Attention::write_kv`] is about.
#[derive(Debug, Clone, Copy)]
pub struct WriteCall<'a> {
    /// `[num_tokens, num_kv_heads, head_dim_k]`.
    pub key: ActivationView,
    /// `[num_tokens, num_kv_heads, head_dim_v]`.
    pub value: ActivationView,
    /// `[num_blocks, num_kv_heads, block_size, head_dim_k]`.
    pub key_cache: CacheView,
    /// `[num_blocks, num_kv_heads, block_size, head_dim_v]`.
    pub value_cache: CacheView,
    /// What 8-bit numbers are multiplied by: read if it is one for all, written if it is one for each token and head.
    pub scales: Scales,
    /// Each token's `block * block_size + offset`, or -1 for a token that is not written.
    pub slots: &'a [i64],
    /// How many threads may work, this one included.
    pub num_threads: usize,
}

impl Attention {
    /// Writes each token's key and value to its slot. Where two tokens have one slot, the later one stays.
    ///
    /// # Errors
    /// A slot is out of range or the views do not fit each other; nothing was written.
    ///
    /// # Safety
    /// The views describe memory that is readable (the caches: writable, and shared with no other view) for the whole
    /// call, at every index within their shapes.
    pub unsafe fn write_kv(&self, call: &WriteCall) -> Result<(), Error> {
        check_views(call)?;
        check_slots(call)?;
        let bytes = call.slots.len() * call.key.shape[1] * (call.key.head_dim + call.value.head_dim) * 4;
        let num_threads = call.num_threads.min(1 + bytes / THREAD_BYTES);
        // SAFETY: the same contract.
        unsafe { self.write_rows(call, num_threads) }
    }

    /// Lets threads claim neighbouring heads of the keys or of the values, so that no row is written by two of them.
    ///
    /// # Safety
    /// The views are valid and the slots checked.
    unsafe fn write_rows(&self, call: &WriteCall, num_threads: usize) -> Result<(), Error> {
        let num_heads = call.key_cache.num_kv_heads();
        let num_parts = num_threads.min(num_heads);
        let claims = AtomicUsize::new(0);
        self.run(num_threads, &|_| {
            loop {
                let task = claims.fetch_add(1, Ordering::Relaxed);
                let (part, side) = (task / 2, if task.is_multiple_of(2) { Side::Key } else { Side::Value });
                if part >= num_parts {
                    return;
                }
                let heads = num_heads * part / num_parts..num_heads * (part + 1) / num_parts;
                // SAFETY: this thread alone has this side of these heads.
                unsafe { write_heads(call, side, heads) };
            }
        })
    }
}

/// # Safety
/// The views are valid, the slots checked, and no other thread writes this side of these heads.
unsafe fn write_heads(call: &WriteCall, side: Side, heads: Range<usize>) {
    let (from, cache) = match side {
        Side::Key => (&call.key, &call.key_cache),
        Side::Value => (&call.value, &call.value_cache),
    };
    let writer = RowWriter::choose(cache.format, InstructionSet::detect());
    for (token, &slot) in call.slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else { continue };
        let (block, offset) = (slot / cache.block_size(), slot % cache.block_size());
        for head in heads.clone() {
            let (row, to) = (from.row(token, head), cache.row(block, head, offset));
            // SAFETY: the row lies in the activations, the slot in the cache and in the scales.
            unsafe {
                let narrow = |scale| {
                    let (format, head_dim) = (from.format, from.head_dim);
                    writer.write(&Row { from: row, format, head_dim, scale, to })
                };
                match call.scales {
                    Scales::None => to.copy_from_nonoverlapping(row, cache.row_bytes()),
                    Scales::Tensor { key, value } => {
                        narrow(Some(if side == Side::Key { key } else { value }));
                    }
                    Scales::Token(scales) => {
                        scales.entry(block, side, head, offset).write_unaligned(narrow(None))
                    }
                }
            }
        }
    }
}

fn check_slots(call: &WriteCall) -> Result<(), Error> {
    let last = (call.key_cache.num_blocks() * call.key_cache.block_size()) as i64 - 1;
    match call.slots.iter().position(|slot| !(-1..=last).contains(slot)) {
        Some(index) => Err(Error::Slot { index, value: call.slots[index], last }),
        None => Ok(()),
    }
}

fn check_views(call: &WriteCall) -> Result<(), Error> {
    let (key, value, keys, values) = (&call.key, &call.value, &call.key_cache, &call.value_cache);
    let is_narrow = matches!(keys.format, Format::Int8 | Format::Fp8);
    let rules = [
        (
            keys.shape == values.shape,
            "key_cache and value_cache must have the same blocks, heads and block size",
        ),
        (keys.shape[2] > 0, "the block size must not be 0"),
        (keys.format == values.format, "key_cache and value_cache must have the same format"),
        (key.format == value.format, "key and value must have the same format"),
        (key.shape == value.shape, "key and value must have the same tokens and heads"),
        (
            key.shape == [call.slots.len(), keys.num_kv_heads()],
            "key must have one row for each slot and KV head",
        ),
        (key.head_dim == keys.head_dim, "key and key_cache must have the same head size"),
        (value.head_dim == values.head_dim, "value and value_cache must have the same head size"),
        (is_narrow || key.format == keys.format, "the caches must have the key's format, or 8 bits"),
        (is_narrow == (call.scales != Scales::None), "8-bit caches, and only these, have scales"),
    ];
    match rules.into_iter().find(|(holds, _)| !holds) {
        Some((_, text)) => Err(Error::Mismatch(text)),
        None => Ok(()),
    }
}
