//! Reads memory and does nothing else: what the attention's speed is measured against.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::{Attention, Error};

/// How much a thread claims at a time.
const PART: usize = 1 << 20;

impl Attention {
    /// Reads whole words of 8 bytes on up to `num_threads` threads, and returns their combination by exclusive or.
    ///
    /// # Errors
    /// [`Error::Poisoned`].
    pub fn read(&self, words: &[u64], num_threads: usize) -> Result<u64, Error> {
        let result = AtomicU64::new(0);
        let claims = AtomicUsize::new(0);
        self.run(num_threads, &|_| {
            while let Some(part) = words.chunks(PART / 8).nth(claims.fetch_add(1, Ordering::Relaxed)) {
                result.fetch_xor(combine(part), Ordering::Relaxed);
            }
        })?;
        Ok(result.into_inner())
    }
}

fn combine(words: &[u64]) -> u64 {
    let mut lanes = [0u64; 64];
    let chunks = words.chunks_exact(64);
    let rest = chunks.remainder().iter().fold(0, |result, word| result ^ word);
    for chunk in chunks {
        for (lane, word) in lanes.iter_mut().zip(chunk) {
            *lane ^= word;
        }
    }
    lanes.into_iter().fold(rest, |result, lane| result ^ lane)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_once() {
        let words: Vec<u64> =
            (0..300_001).map(|word: u64| word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let expected = words.iter().fold(0, |result, word| result ^ word);
        assert_eq!(Attention::new().read(&words, 2), Ok(expected));
    }
}
