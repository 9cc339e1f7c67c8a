//! What decodes leave of a step's budget to prompts of an earlier rank.

/// What prompts of an earlier rank get of a step's budget before the decodes of a later one: their next chunks, or half of
/// the budget if that is less. Asked in the order of the ranks.
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

    /// Tokens at the most.
    pub(super) fn most(&self) -> usize {
        self.most
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
        let starting =
            self.starting.filter(|&(first, _)| first < rank).map_or(0, |(_, num_tokens)| num_tokens);
        self.most.min(self.earlier + starting)
    }

    /// A prompt is to start in this step, with a first chunk of some tokens.
    pub(super) fn start(&mut self, rank: u64, num_tokens: usize) {
        self.starting = Some((rank, num_tokens));
    }

    /// Nobody starts in this step: somebody was preempted, or left out for want of a block.
    pub(super) fn nobody_starts(&mut self) {
        self.starting = None;
    }

    fn reach(&mut self, rank: u64) {
        if rank > self.rank {
            self.rank = rank;
            self.earlier += std::mem::take(&mut self.same);
        }
    }
}
