//! What was so over time, in a bounded number of points.

use super::engine::Memory;

/// The means of some steps that follow each other, weighted by how long they took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// When the first of them began, in seconds.
    pub start: f64,
    /// How long they took together, in seconds.
    pub seconds: f64,
    /// Requests that ran.
    pub running: f64,
    /// Requests that waited.
    pub waiting: f64,
    /// Slots kept for running requests.
    pub reserved_slots: f64,
    /// Those of them that held a token.
    pub held_tokens: f64,
    /// Slots of cached blocks that nobody used.
    pub cached_slots: f64,
    /// Free slots outside the longest free piece.
    pub broken_slots: f64,
    /// Tokens computed: not a mean, a sum.
    pub computed_tokens: f64,
}

impl Point {
    fn each(&self) -> [f64; 6] {
        [
            self.running,
            self.waiting,
            self.reserved_slots,
            self.held_tokens,
            self.cached_slots,
            self.broken_slots,
        ]
    }

    /// The mean of two points, the first of which began first.
    fn join(self, other: Self) -> Self {
        let seconds = self.seconds + other.seconds;
        let share = if seconds > 0.0 { other.seconds / seconds } else { 0.5 };
        let (first, second) = (self.each(), other.each());
        let mean: [f64; 6] = std::array::from_fn(|i| first[i] + share * (second[i] - first[i]));
        let [running, waiting, reserved_slots, held_tokens, cached_slots, broken_slots] = mean;
        Self {
            start: self.start,
            seconds,
            running,
            waiting,
            reserved_slots,
            held_tokens,
            cached_slots,
            broken_slots,
            computed_tokens: self.computed_tokens + other.computed_tokens,
        }
    }
}

/// Steps as points of equal length in time. The length doubles whenever there are too many.
#[derive(Debug)]
pub(super) struct Series {
    points: Vec<Point>,
    max_points: usize,
    seconds_per_point: f64,
}

const FIRST_SECONDS: f64 = 1.0 / 1024.0;

impl Series {
    /// No step yet, and never more than `max_points` points.
    pub(super) fn new(max_points: usize) -> Self {
        Self { points: Vec::new(), max_points: max_points.max(2), seconds_per_point: FIRST_SECONDS }
    }

    /// Adds a step.
    pub(super) fn push(&mut self, start: f64, seconds: f64, memory: Memory, waiting: usize, tokens: u64) {
        let free = memory.total_slots - memory.reserved_slots;
        let point = Point {
            start,
            seconds,
            running: memory.running as f64,
            waiting: waiting as f64,
            reserved_slots: memory.reserved_slots as f64,
            held_tokens: memory.held_tokens as f64,
            cached_slots: memory.cached_slots as f64,
            broken_slots: free.saturating_sub(memory.largest_free_slots) as f64,
            computed_tokens: tokens as f64,
        };
        self.add(point);
        while self.points.len() > self.max_points {
            self.seconds_per_point *= 2.0;
            std::mem::take(&mut self.points).into_iter().for_each(|point| self.add(point));
        }
    }

    /// The points, by time.
    pub(super) fn into_points(self) -> Vec<Point> {
        self.points
    }

    fn add(&mut self, point: Point) {
        let bucket = |start: f64| (start / self.seconds_per_point) as u64;
        match self.points.last_mut() {
            Some(last) if bucket(last.start) == bucket(point.start) => *last = last.join(point),
            _ => self.points.push(point),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_steps_become_few_points_with_the_same_means() {
        let mut series = Series::new(8);
        for step in 0..1000 {
            let memory = Memory { total_slots: 100, reserved_slots: step % 2 * 10, ..Memory::default() };
            series.push(step as f64, 1.0, memory, step, 2);
        }
        let points = series.into_points();
        assert!((2..=8).contains(&points.len()), "{}", points.len());
        let seconds: f64 = points.iter().map(|point| point.seconds).sum();
        let mean = points.iter().map(|point| point.waiting * point.seconds).sum::<f64>() / seconds;
        assert_eq!(
            (seconds, points.iter().map(|point| point.computed_tokens).sum::<f64>()),
            (1000.0, 2000.0)
        );
        assert!((mean - 499.5).abs() < 1e-6, "{mean}");
        assert!((points[1].reserved_slots - 5.0).abs() < 0.1);
    }
}
