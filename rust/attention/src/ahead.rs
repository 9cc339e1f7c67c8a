//! Asks for memory before it is needed, a few cache lines at a time between the computations.
//!
//! A core has few places for lines that are under way and drops what is asked for beyond them: many lines at once are
//! lost, none for a while leaves the memory idle. So the asking keeps an even pace. And it goes through the memory in
//! its order, a whole span of all heads ahead: long runs are served faster than the pieces that one head has.
//!
//! Where the computations are over sooner than the memory comes, even the slowest even pace is too fast. Then a part
//! is left to be read at the end of a span, as fast as the memory gives it.

use crate::simd::Simd;

/// The bytes of a cache line.
const LINE: usize = 64;

/// The most stretches that are kept; memory beyond them is read when it is needed.
const MOST_STRETCHES: usize = 256;

/// The stages of the work on a KV head's span, in their order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stage {
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
    /// The same with so many lines that the stages are over before they came.
    Stream,
    /// More rows do: the values are copied first, and with many the products take nearly all of the time.
    ManyRows,
}

impl Load {
    /// That of few rows over memory of so many lines, which hold numbers of so many bytes.
    pub(crate) fn of_few_rows(num_lines: usize, number_bytes: usize) -> Load {
        if number_bytes > 1 && num_lines >= STREAM_LINES { Load::Stream } else { Load::FewRows }
    }

    /// The percentage of a turn's lines that were asked for at the end of a stage. Those of few rows are the fastest
    /// of some that were tried; those of many rows follow the stages' times.
    fn percentage(self, stage: Stage) -> usize {
        match (self, stage) {
            (Load::FewRows | Load::Stream, Stage::Scores) => 42,
            (Load::FewRows | Load::Stream, Stage::Weights) => 54,
            (Load::ManyRows, Stage::Scores) => 43,
            (Load::ManyRows, Stage::Weights) => 54,
            (Load::ManyRows, Stage::Values) => 57,
            (Load::FewRows | Load::Stream, Stage::Values) | (_, Stage::Outputs) => 100,
        }
    }

    /// The percentage of the lines that are asked for at all; the others are read in the end.
    fn asked_percentage(self) -> usize {
        if self == Load::Stream { 82 } else { 100 }
    }
}

/// From so many lines of a span on it pays to wait for those that were left.
const STREAM_LINES: usize = 1024;

/// Memory that lies side by side.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Stretch {
    address: usize,
    num_bytes: usize,
}

impl Stretch {
    fn num_lines(&self) -> usize {
        self.num_bytes.div_ceil(LINE)
    }

    /// Takes up to `count` lines off its beginning, and returns one address in each of them.
    fn take(&mut self, count: usize) -> impl ExactSizeIterator<Item = *const u8> + use<> {
        let count = count.min(self.num_lines());
        let first = self.address;
        let num_bytes = self.num_bytes.min(count * LINE);
        (self.address, self.num_bytes) = (first + num_bytes, self.num_bytes - num_bytes);
        (0..count).map(move |line| (first + line * LINE) as *const u8)
    }
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
        let stretch = Stretch { address: address as usize, num_bytes };
        if let Some(last) = self.stretches.last_mut()
            && last.address + last.num_bytes == stretch.address
        {
            self.num_lines -= last.num_lines();
            last.num_bytes += num_bytes;
            self.num_lines += last.num_lines();
        } else if self.stretches.len() < MOST_STRETCHES {
            self.num_lines += stretch.num_lines();
            self.stretches.push(stretch);
        }
    }

    /// How many lines there are.
    pub(crate) fn num_lines(&self) -> usize {
        self.num_lines
    }

    /// The stretches: each one's address and bytes.
    #[cfg(test)]
    pub(crate) fn listed(&self) -> Vec<(usize, usize)> {
        self.stretches.iter().map(|stretch| (stretch.address, stretch.num_bytes)).collect()
    }

    /// Begins turn `turn` of `num_turns`, each of which asks for an equal share.
    pub(crate) fn begin(&mut self, turn: usize, num_turns: usize, load: Load) {
        (self.turn, self.num_turns, self.load) = (turn, num_turns, load);
    }

    /// Begins a stage of the present turn, in which memory is asked for `times` times.
    #[inline(always)]
    pub(crate) fn enter(&mut self, stage: Stage, times: usize) {
        let num_lines = self.num_lines * self.load.asked_percentage();
        let goal =
            (num_lines << 16) / (10_000 * self.num_turns) * (100 * self.turn + self.load.percentage(stage));
        self.pace = goal.saturating_sub(self.goal).div_ceil(times.max(1));
    }

    /// Asks for as many lines as keep the pace.
    #[inline(always)]
    pub(crate) fn ask<S: Simd>(&mut self, simd: S) {
        self.goal += self.pace;
        let goal = (self.goal >> 16).min(self.num_lines);
        while self.asked < goal {
            for line in self.take(goal) {
                simd.prefetch(line);
            }
        }
    }

    /// Reads what was not asked for yet.
    ///
    /// # Safety
    /// All memory that was added is readable.
    pub(crate) unsafe fn read_rest(&mut self) {
        while self.asked < self.num_lines {
            for line in self.take(self.num_lines) {
                // SAFETY: by this function's contract. A volatile read is done though nobody needs its value.
                unsafe { line.read_volatile() };
            }
        }
    }

    /// The next lines that lie side by side, so many that no more than `goal` are asked for.
    #[inline(always)]
    fn take(&mut self, goal: usize) -> impl ExactSizeIterator<Item = *const u8> + use<> {
        if self.rest.num_bytes == 0 {
            self.rest = self.stretches[self.next];
            self.next += 1;
        }
        let lines = self.rest.take(goal - self.asked);
        self.asked += lines.len();
        lines
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
        assert_eq!(ahead.listed(), [(64, 174), (512, 1), (576, 64)]);
        assert_eq!(ahead.num_lines(), 5);
    }

    #[test]
    fn the_lines_are_asked_for_at_an_even_pace_until_none_is_left() {
        let mut ahead = Ahead::default();
        ahead.add(60 as *const u8, 100);
        ahead.add(1280 as *const u8, 64 * 198);
        assert_eq!(ahead.num_lines, 200);
        let stages = [Stage::Scores, Stage::Weights, Stage::Values, Stage::Outputs];
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
        assert_eq!(ahead.rest.num_lines(), 200 - ahead.asked);
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
            assert!((41..=42).contains(&ahead.asked));
        }
    }

    #[test]
    fn what_was_left_is_read() {
        let memory = [0u8; 70_000];
        let mut ahead = Ahead::default();
        ahead.add(memory.as_ptr(), 65_000);
        ahead.add(memory[65_001..].as_ptr(), 4_999);
        let load = Load::of_few_rows(ahead.num_lines(), 2);
        assert_eq!((ahead.num_lines(), load), (1016 + 79, Load::Stream));
        ahead.begin(0, 1, load);
        ahead.enter(Stage::Values, 1);
        ahead.ask(Portable);
        assert_eq!(ahead.asked, 1095 * 82 / 100);
        // SAFETY: the array can be read.
        unsafe { ahead.read_rest() };
        assert_eq!((ahead.asked, ahead.rest.num_bytes), (1095, 0));
        assert_eq!(Load::of_few_rows(1095, 1), Load::FewRows);
        assert_eq!(Load::of_few_rows(1000, 4), Load::FewRows);
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
