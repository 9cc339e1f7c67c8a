//! What decodes leave of a step's budget to prompts of an earlier rank, and prompts to one that starts before them.

/// What prompts of an earlier rank get of a step's budget before the decodes of a later one: their next chunks, or half of
/// the budget if that is less. Prompts of a later rank leave the same to the one that starts; what remains of a step is
/// theirs, so that it computes something whether or not that one starts. Decodes ask in the order of the ranks.
///
/// The one that starts may turn out to compute less than was kept for it: it shares what other prompts announce in this very
/// step, and that is planned behind the decodes, whose rows come first. Then some decodes are left out of a step that has
/// budget left, or chunks of later prompts cut short, and go on in the next one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reserve {
    most: usize,
    /// The rank of the one that starts in this step, and the tokens of its first chunk.
    starting: Option<(u64, usize)>,
    /// The rank that was asked for last.
    rank: u64,
    /// Tokens in the chunks of earlier ranks, and of that rank.
    earlier: usize,
    same: usize,
}

impl Reserve {
    /// A reserve of so many tokens at the most.
    pub(super) fn of(most: usize) -> Self {
        Self { most, ..Self::default() }
    }

    /// Whether anything may be kept back.
    pub(super) fn is_on(&self) -> bool {
        self.most > 0
    }

    /// A running prompt has a chunk of some tokens left.
    pub(super) fn add(&mut self, rank: u64, num_tokens: usize) {
        self.reach(rank);
        self.same += num_tokens;
    }

    /// Tokens that are kept back from the decodes of a rank.
    pub(super) fn kept_from(&mut self, rank: u64) -> usize {
        self.reach(rank);
        self.most.min(self.earlier + self.of_starting(rank))
    }

    /// Tokens that are kept back from the chunks of a rank.
    pub(super) fn kept_to_start(&self, rank: u64) -> usize {
        self.most.min(self.of_starting(rank))
    }

    /// A prompt is to start in this step, with a first chunk of some tokens.
    pub(super) fn start(&mut self, rank: u64, num_tokens: usize) {
        self.starting = Some((rank, num_tokens));
    }

    /// Nobody starts in this step: somebody was preempted, or left out for want of a block.
    pub(super) fn nobody_starts(&mut self) {
        self.starting = None;
    }

    /// The first chunk of the one that starts, if that is of an earlier rank.
    fn of_starting(&self, rank: u64) -> usize {
        self.starting.filter(|&(first, _)| first < rank).map_or(0, |(_, num_tokens)| num_tokens)
    }

    fn reach(&mut self, rank: u64) {
        if rank > self.rank {
            self.rank = rank;
            self.earlier += std::mem::take(&mut self.same);
        }
    }
}
