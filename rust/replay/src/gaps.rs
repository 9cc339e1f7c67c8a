//! Times between the requests of a session: what a guess of its end goes by.

/// Gaps after which an idle session is taken for over.
pub const IDLE_GAPS: f64 = 8.0;

/// How many gaps there were, and how long they were together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gaps {
    seconds: f64,
    count: u32,
}

impl Gaps {
    pub(crate) fn add(&mut self, seconds: f64) {
        self.seconds += seconds;
        self.count += 1;
    }

    pub(crate) fn mean(self) -> Option<f64> {
        (self.count > 0).then(|| self.seconds / f64::from(self.count))
    }
}
