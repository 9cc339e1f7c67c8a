//! The invariants of `docs/invariants.md`, checked over everything there is.

use hashbrown::HashMap;

use super::Scheduler;
use super::sequence::{SeqIndex, Sequence};
use crate::error::{Error, Result};
use crate::units::BlockId;

impl Scheduler {
    /// Compares pool, tree, tables, rows and queues with each other, in time that grows with all of them.
    ///
    /// # Errors
    /// [`Error::Broken`] with the first invariant that does not hold: the scheduler must not be used any further.
    pub fn check(&mut self) -> Result<()> {
        self.cache.check()?;
        self.check_references()?;
        self.check_host()?;
        self.check_rows()?;
        self.check_states()?;
        self.check_lists()?;
        self.check_in_flight()?;
        self.placed().try_for_each(|sequence| self.check_sequence(sequence))
    }

    fn check_references(&self) -> Result<()> {
        let mut held: HashMap<BlockId, usize> = HashMap::new();
        for &block in self.placed().flat_map(|sequence| &sequence.tables).flat_map(|table| table.held()) {
            *held.entry(block).or_default() += 1;
        }
        let sources =
            self.in_flight.iter().flat_map(|step| &step.sources).flat_map(|sources| sources.held()).copied();
        for block in self.cache.iter_pinned().chain(sources) {
            *held.entry(block).or_default() += 1;
        }
        if held.contains_key(&BlockId::NULL) {
            return Err(Error::broken("I2 null block", "a table holds block 0"));
        }
        for id in 1..self.config.num_blocks as u32 {
            let block = BlockId::new(id);
            let (counted, tables) =
                (self.cache.pool().references(block), held.get(&block).copied().unwrap_or(0));
            if counted != tables {
                let detail = format!("block {id} counts {counted} references, tables and pins hold {tables}");
                return Err(Error::broken("I3 references", detail));
            }
        }
        Ok(())
    }

    /// Whether exactly the host blocks of swapped sequences are taken.
    fn check_host(&self) -> Result<()> {
        let Some(host) = &self.host else { return Ok(()) };
        let away = self.waiting.values().copied().chain(self.paused.iter());
        let waiting = away.filter_map(|index| self.sequences[index].swapped.as_ref());
        let coming = self.in_flight.iter().flat_map(|step| &step.swapped_in).map(|(_, swapped)| swapped);
        let held: usize =
            waiting.chain(coming).flat_map(|swapped| &swapped.tables).map(|table| table.held().len()).sum();
        let counts = host.count();
        if counts.active != held || counts.free != host.num_free() || counts.free + held != counts.total {
            let detail = format!("the host counts {counts:?}, sequences hold {held} of its blocks");
            return Err(Error::broken("I1 partition", detail));
        }
        Ok(())
    }

    fn check_rows(&self) -> Result<()> {
        let mut taken = vec![false; self.config.max_num_seqs];
        let rows = self.placed().flat_map(|sequence| &sequence.rows);
        for row in rows.chain(&self.free_rows) {
            if std::mem::replace(&mut taken[row.index()], true) {
                return Err(Error::broken("I7 rows", format!("row {} stands twice", row.get())));
            }
        }
        match taken.iter().position(|taken| !taken) {
            Some(row) => Err(Error::broken("I7 rows", format!("row {row} is lost"))),
            None => Ok(()),
        }
    }

    fn check_lists(&self) -> Result<()> {
        let listed = self.running.len() + self.waiting.len() + self.paused.iter().count();
        if listed != self.sequences.len() {
            let detail = format!("{} sequences live, {listed} are listed", self.sequences.len());
            return Err(Error::broken("I8 lists", detail));
        }
        let queued: usize = self.waiting.values().map(|&index| self.sequences[index].num_samples).sum();
        if queued != self.num_queued {
            return Err(Error::broken("I8 lists", format!("{queued} wait, {} are counted", self.num_queued)));
        }
        let tokens: usize = self.waiting.values().map(|&index| self.sequences[index].tokens.len()).sum();
        if tokens != self.num_queued_tokens {
            let detail = format!("{tokens} tokens wait, {} are counted", self.num_queued_tokens);
            return Err(Error::broken("I8 lists", detail));
        }
        if let Some(rowless) = self.running.iter().find(|&&index| !self.sequences[index].is_running()) {
            let request = self.sequences[*rowless].key.request.get();
            return Err(Error::broken("I8 lists", format!("request {request} runs without a row")));
        }
        self.check_turns()?;
        self.check_paused()?;
        if !self.running.is_sorted_by_key(|&index| self.sequences[index].key) {
            return Err(Error::broken("I8 lists", "the running ones are not sorted by age"));
        }
        let live: usize = self.requests.values().map(|request| request.num_live).sum();
        let listed = self.running.iter().chain(self.waiting.values()).copied().chain(self.paused.iter());
        if live != listed.map(|index| self.sequences[index].num_samples).sum::<usize>() {
            return Err(Error::broken("I8 lists", format!("requests count {live} live samples")));
        }
        Ok(())
    }

    /// Whether each sequence counts the steps in flight that have a row for it, and whether only those that have one wait
    /// for its end.
    fn check_in_flight(&self) -> Result<()> {
        let mut rows: HashMap<SeqIndex, u8> = HashMap::new();
        for scheduled in self.in_flight.iter().flat_map(|step| &step.rows) {
            *rows.entry(scheduled.sequence).or_default() += 1;
        }
        for &index in self.running.iter().chain(self.waiting.values()) {
            let (sequence, counted) = (&self.sequences[index], rows.remove(&index).unwrap_or(0));
            let waits_for_nothing = (sequence.is_leaving || sequence.placeholder.is_some()) && counted == 0;
            if sequence.num_in_flight != counted || waits_for_nothing {
                let key = sequence.key;
                let (request, child, stated) = (key.request.get(), key.child, sequence.num_in_flight);
                let detail =
                    format!("request {request}.{child} counts {stated} rows, the steps have {counted}");
                return Err(Error::broken("I16 in flight", detail));
            }
        }
        match rows.len() {
            0 => Ok(()),
            ended => Err(Error::broken("I16 in flight", format!("{ended} sequences with a row have ended"))),
        }
    }

    fn check_sequence(&self, sequence: &Sequence) -> Result<()> {
        let (size, key) = (self.block_size, sequence.key);
        let broken = |invariant, detail: String| {
            Err(Error::broken(invariant, format!("request {}.{}: {detail}", key.request.get(), key.child)))
        };
        if sequence.tokens.len() >= sequence.max_len || sequence.max_len > self.config.cap() {
            return broken(
                "I10 cap",
                format!("{} tokens, at most {}", sequence.tokens.len(), sequence.max_len),
            );
        }
        for (table, group) in sequence.tables.iter().zip(&self.config.groups) {
            // Who is left out of a plan may have a block for the token that a step in flight samples.
            let coming = usize::from(sequence.is_in_flight() && sequence.placeholder.is_none());
            let (blocks, needed) = (table.len(), size.blocks_for(sequence.tokens.len() + coming));
            if blocks > needed || blocks < size.blocks_for(sequence.num_planned) {
                return broken("I11 waste", format!("{blocks} blocks for {} tokens", sequence.tokens.len()));
            }
            let chunk = self.config.chunk().max(1 + self.config.num_lookahead_tokens);
            // With two steps in flight, a chunk may be planned ahead, and one may be published a step late.
            let chunk = chunk.saturating_mul(2 * self.config.max_steps_in_flight - 1);
            let most = group.most_blocks(sequence.tokens.len() + coming, chunk, size);
            if table.held().len() > most + self.config.kept_blocks() + sequence.shared_blocks {
                return broken("I14 window", format!("{} blocks held, at most {most}", table.held().len()));
            }
            if table.num_dropped() > group.first_block(sequence.num_computed, size) {
                return broken("I14 window", format!("{} blocks given back too early", table.num_dropped()));
            }
            if self.config.enable_prefix_caching
                && table.num_dropped() > self.cache.droppable(sequence.cursor)
            {
                return broken(
                    "I6 chain",
                    "the block that the next one hangs below was given back".to_string(),
                );
            }
        }
        if sequence.num_computed > sequence.num_planned || sequence.num_planned > sequence.tokens.len() {
            return broken(
                "I12 order",
                format!("{} computed, {} planned", sequence.num_computed, sequence.num_planned),
            );
        }
        if sequence.num_drafts > 0 && self.in_flight.is_empty() {
            return broken("I15 drafts", format!("{} are left of a step that is over", sequence.num_drafts));
        }
        if sequence.cursor.published > size.full_blocks(sequence.num_planned - sequence.num_drafts) {
            return broken("I13 published", format!("{} blocks published", sequence.cursor.published));
        }
        Ok(())
    }
}
