//! Asks for memory before it is needed, a few cache lines at a time between the computations.
//!
//! Asking for many lines at once stops the machine; asking for none leaves the memory idle.

use crate::simd::Simd;

/// The bytes of a cache line.
const LINE: usize = 64;

/// The most stretches that are kept; memory beyond them is read when it is needed.
const MOST_STRETCHES: usize = 256;

/// Memory that lies side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    address: usize,
    num_lines: usize,
}

/// Stretches of memory, and how much of them was asked for.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    stretches: Vec<Stretch>,
    num_lines: usize,
    /// The stretch that comes next, and its lines that were asked for.
    next: usize,
    line: usize,
    asked: usize,
    /// Which of how many equal turns this is.
    turn: usize,
    num_turns: usize,
}

impl Ahead {
    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.stretches.clear();
        (self.num_lines, self.next, self.line, self.asked) = (0, 0, 0, 0);
    }

    /// Adds `num_bytes` from `address` on.
    pub(crate) fn add(&mut self, address: *const u8, num_bytes: usize) {
        let end = (address as usize + num_bytes).next_multiple_of(LINE);
        let address = address as usize / LINE * LINE;
        if let Some(last) = self.stretches.last_mut() {
            let last_end = last.address + last.num_lines * LINE;
            if last.address <= address && address <= last_end && last_end <= end {
                last.num_lines += (end - last_end) / LINE;
                self.num_lines += (end - last_end) / LINE;
                return;
            }
        }
        if self.stretches.len() < MOST_STRETCHES {
            let num_lines = (end - address) / LINE;
            self.stretches.push(Stretch { address, num_lines });
            self.num_lines += num_lines;
        }
    }

    /// Begins turn `turn` of `num_turns`, each of which asks for an equal share.
    pub(crate) fn begin(&mut self, turn: usize, num_turns: usize) {
        (self.turn, self.num_turns) = (turn, num_turns);
    }

    /// Asks for lines until `part` of `whole` of the present turn's share were asked for.
    #[inline(always)]
    pub(crate) fn ask<S: Simd>(&mut self, simd: S, part: usize, whole: usize) {
        if self.asked == self.num_lines {
            return;
        }
        let goal = self.num_lines * (self.turn * whole + part.min(whole)) / (self.num_turns * whole);
        while self.asked < goal {
            let stretch = self.stretches[self.next];
            let end = stretch.num_lines.min(self.line + goal - self.asked);
            for line in self.line..end {
                simd.prefetch((stretch.address + line * LINE) as *const u8);
            }
            self.asked += end - self.line;
            self.line = end;
            if end == stretch.num_lines {
                self.next += 1;
                self.line = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::portable::Portable;

    #[test]
    fn neighbours_become_one_stretch() {
        let mut ahead = Ahead::default();
        for (address, num_bytes) in [(64, 64), (128, 100), (228, 10), (512, 1), (576, 64)] {
            ahead.add(address as *const u8, num_bytes);
        }
        let expected = [(64, 3), (512, 2)].map(|(address, num_lines)| Stretch { address, num_lines });
        assert_eq!(ahead.stretches, expected);
        assert_eq!(ahead.num_lines, 5);
    }

    #[test]
    fn every_line_is_asked_for_once_all_turns_are_over() {
        let mut ahead = Ahead::default();
        ahead.add(60 as *const u8, 8);
        ahead.add(1280 as *const u8, 64 * 5);
        assert_eq!(ahead.num_lines, 7);
        for turn in 0..2 {
            ahead.begin(turn, 2);
            for part in 0..=10 {
                ahead.ask(Portable, part, 10);
                assert_eq!(ahead.asked, 7 * (turn * 10 + part) / 20);
            }
        }
        assert_eq!((ahead.next, ahead.line), (2, 0));
    }
}
