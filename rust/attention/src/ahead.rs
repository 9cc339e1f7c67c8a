//! Asks for memory before it is needed, a few cache lines at a time between the computations.
//!
//! A core has few places for lines that are under way and drops what is asked for beyond them: many lines at once are
//! lost, none for a while leaves the memory idle. So the asking keeps an even pace. And it goes through the memory in
//! its order, a whole span of all heads ahead: long runs are served faster than the pieces that one head has.

use crate::simd::Simd;

/// The bytes of a cache line.
const LINE: usize = 64;

/// The most stretches that are kept; memory beyond them is read when it is needed.
const MOST_STRETCHES: usize = 256;

/// The stages of the work on a KV head's span, in their order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stage {
    Keys,
    Scores,
    Weights,
    Values,
    /// The weighted sums, where the values were copied first.
    Outputs,
}

/// What a turn's stages take, and so when its lines are asked for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// A few rows read each key and value: all stages wait for memory, and the values are summed where they are.
    #[default]
    FewRows,
    /// More rows do: the values are copied first, and with many the products take nearly all of the time.
    ManyRows,
}

impl Load {
    /// The percentage of a turn's lines that were asked for at the end of a stage. Those of few rows are the fastest
    /// of some that were tried; those of many rows follow the stages' times.
    fn percentage(self, stage: Stage) -> usize {
        match (self, stage) {
            (Load::FewRows, Stage::Keys) => 24,
            (Load::FewRows, Stage::Scores) => 40,
            (Load::FewRows, Stage::Weights) => 54,
            (Load::ManyRows, Stage::Keys) => 3,
            (Load::ManyRows, Stage::Scores) => 43,
            (Load::ManyRows, Stage::Weights) => 54,
            (Load::ManyRows, Stage::Values) => 57,
            (Load::FewRows, Stage::Values) | (_, Stage::Outputs) => 100,
        }
    }
}

/// Memory that lies side by side.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    address: usize,
    num_lines: usize,
}

/// Stretches of memory, and how much of them was asked for.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    stretches: Vec<Stretch>,
    num_lines: usize,
    /// What is left of the stretch that is asked for, and which one comes next.
    rest: Stretch,
    next: usize,
    asked: usize,
    /// How many lines should have been asked for by now, in 65,536ths, and how many more by the next time.
    goal: usize,
    pace: usize,
    /// Which of how many equal turns this is, and of what kind.
    turn: usize,
    num_turns: usize,
    load: Load,
}

impl Ahead {
    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.stretches.clear();
        self.rest = Stretch::default();
        (self.num_lines, self.next, self.asked, self.goal, self.pace) = (0, 0, 0, 0, 0);
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

    /// The stretches: each one's address and lines.
    #[cfg(test)]
    pub(crate) fn listed(&self) -> Vec<(usize, usize)> {
        self.stretches.iter().map(|stretch| (stretch.address, stretch.num_lines)).collect()
    }

    /// Begins turn `turn` of `num_turns`, each of which asks for an equal share.
    pub(crate) fn begin(&mut self, turn: usize, num_turns: usize, load: Load) {
        (self.turn, self.num_turns, self.load) = (turn, num_turns, load);
    }

    /// Begins a stage of the present turn, in which memory is asked for `times` times.
    #[inline(always)]
    pub(crate) fn enter(&mut self, stage: Stage, times: usize) {
        let goal =
            (self.num_lines << 16) / (100 * self.num_turns) * (100 * self.turn + self.load.percentage(stage));
        self.pace = goal.saturating_sub(self.goal).div_ceil(times.max(1));
    }

    /// Asks for as many lines as keep the pace.
    #[inline(always)]
    pub(crate) fn ask<S: Simd>(&mut self, simd: S) {
        self.goal += self.pace;
        let goal = (self.goal >> 16).min(self.num_lines);
        while self.asked < goal {
            if self.rest.num_lines == 0 {
                self.rest = self.stretches[self.next];
                self.next += 1;
            }
            let count = self.rest.num_lines.min(goal - self.asked);
            for line in 0..count {
                simd.prefetch((self.rest.address + line * LINE) as *const u8);
            }
            self.rest.address += count * LINE;
            self.rest.num_lines -= count;
            self.asked += count;
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
    fn the_lines_are_asked_for_at_an_even_pace_until_none_is_left() {
        let mut ahead = Ahead::default();
        ahead.add(60 as *const u8, 8);
        ahead.add(1280 as *const u8, 64 * 198);
        assert_eq!(ahead.num_lines, 200);
        let stages = [Stage::Keys, Stage::Scores, Stage::Weights, Stage::Values, Stage::Outputs];
        for (turn, load) in [Load::FewRows, Load::ManyRows].into_iter().enumerate() {
            ahead.begin(turn, 2, load);
            let mut before = 0;
            for stage in stages {
                ahead.enter(stage, 10);
                for time in 1..=10 {
                    ahead.ask(Portable);
                    let share = before as f64 + (load.percentage(stage) - before) as f64 * time as f64 / 10.0;
                    assert!((ahead.asked as f64 - 100.0 * turn as f64 - share).abs() <= 1.0);
                }
                before = load.percentage(stage);
            }
        }
        assert!(ahead.asked >= 199);
        assert_eq!(ahead.rest.num_lines, 200 - ahead.asked);
    }

    #[test]
    fn a_stage_that_comes_again_asks_for_nothing_more() {
        let mut ahead = Ahead::default();
        ahead.add(64 as *const u8, 64 * 100);
        ahead.begin(0, 1, Load::FewRows);
        for _ in 0..2 {
            ahead.enter(Stage::Scores, 2);
            ahead.ask(Portable);
            ahead.ask(Portable);
            assert!((39..=40).contains(&ahead.asked));
        }
    }

    #[test]
    fn without_memory_nothing_is_asked_for() {
        let mut ahead = Ahead::default();
        ahead.begin(0, 1, Load::FewRows);
        ahead.enter(Stage::Values, 1);
        ahead.ask(Portable);
        assert_eq!(ahead.asked, 0);
    }
}
