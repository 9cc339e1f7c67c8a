//! How it was done before paging: each request keeps its keys and values in one piece, reserved when it starts.

use std::collections::VecDeque;

use pykv_core::Result;

use super::engine::{Ended, Engine, Memory, Row, Swaps};
use super::first_fit::FirstFit;
use crate::trace::{Request, Run};

/// How much is reserved for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reservation {
    /// What its context may ever be.
    Cap,
    /// What its prompt and its output turn out to need: known to nobody, and the best that one piece could be.
    Exact,
}

/// The limits of a [`Contiguous`] engine.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Slots of the memory.
    pub num_slots: usize,
    /// Tokens of one request, prompt and output together.
    pub max_model_len: usize,
    /// Requests that run at once.
    pub max_num_seqs: usize,
    /// Tokens that one step computes.
    pub max_num_batched_tokens: usize,
}

#[derive(Debug)]
struct Sequence {
    place: usize,
    start: usize,
    reserved: usize,
    num_tokens: usize,
    num_computed: usize,
    /// Tokens that the step in flight computes.
    num_planned: usize,
}

/// First come first served, one piece of memory a request, decodes before prompts, as in the production scheduler.
#[derive(Debug)]
pub struct Contiguous {
    limits: Limits,
    reservation: Reservation,
    memory: FirstFit,
    waiting: VecDeque<(usize, usize, usize)>,
    running: Vec<Sequence>,
}

impl Contiguous {
    /// An engine whose memory is free.
    pub fn new(limits: Limits, reservation: Reservation) -> Self {
        let memory = FirstFit::new(limits.num_slots);
        Self { limits, reservation, memory, waiting: VecDeque::new(), running: Vec::new() }
    }

    fn start_waiting(&mut self) {
        while self.running.len() < self.limits.max_num_seqs
            && let Some(&(place, num_tokens, reserved)) = self.waiting.front()
            && let Some(start) = self.memory.take(reserved)
        {
            self.waiting.pop_front();
            let sequence = Sequence { place, start, reserved, num_tokens, num_computed: 0, num_planned: 0 };
            self.running.push(sequence);
        }
    }
}

impl Engine for Contiguous {
    fn takes_more(&self) -> bool {
        true
    }

    fn submit(&mut self, place: usize, request: &Request, _: &[Run]) -> Result<bool> {
        let prompt = request.prompt_tokens as usize;
        let wanted = prompt + request.output_tokens.max(1) as usize;
        let cap = self.limits.max_model_len.min(self.limits.num_slots);
        let reserved = match self.reservation {
            Reservation::Cap => self.limits.max_model_len,
            Reservation::Exact => wanted.min(cap),
        };
        let fits = prompt < cap && reserved <= self.limits.num_slots;
        if fits {
            self.waiting.push_back((place, prompt, reserved));
        }
        Ok(fits)
    }

    fn begin(&mut self, _: f64) -> Result<Option<Swaps>> {
        self.start_waiting();
        let mut budget = self.limits.max_num_batched_tokens;
        let decodes = |sequence: &Sequence| sequence.num_tokens - sequence.num_computed == 1;
        for is_decode in [true, false] {
            for sequence in self.running.iter_mut().filter(|sequence| decodes(sequence) == is_decode) {
                sequence.num_planned = (sequence.num_tokens - sequence.num_computed).min(budget);
                budget -= sequence.num_planned;
            }
        }
        Ok((!self.running.is_empty()).then_some(Swaps::default()))
    }

    fn rows(&self, rows: &mut Vec<Row>) {
        let planned = self.running.iter().filter(|sequence| sequence.num_planned > 0);
        rows.extend(planned.map(|sequence| Row {
            request: sequence.place,
            num_computed: sequence.num_computed,
            num_tokens: sequence.num_planned,
            samples: sequence.num_computed + sequence.num_planned == sequence.num_tokens,
            reserved_slots: sequence.reserved,
            held_slots: sequence.num_computed + sequence.num_planned,
        }));
    }

    fn memory(&mut self) -> Memory {
        let held = self.running.iter().map(|sequence| sequence.num_computed + sequence.num_planned);
        Memory {
            total_slots: self.limits.num_slots,
            reserved_slots: self.limits.num_slots - self.memory.num_free(),
            held_tokens: held.sum(),
            cached_slots: 0,
            largest_free_slots: self.memory.largest(),
            running: self.running.len(),
            waiting: self.waiting.len(),
            preemptions: 0,
        }
    }

    fn end(&mut self, is_last: &[bool]) -> Result<Vec<Ended>> {
        let mut ended = Vec::new();
        let mut is_last = is_last.iter();
        let memory = &mut self.memory;
        let limits = self.limits;
        self.running.retain_mut(|sequence| {
            if sequence.num_planned == 0 {
                return true;
            }
            sequence.num_computed += std::mem::take(&mut sequence.num_planned);
            if sequence.num_computed < sequence.num_tokens {
                return true;
            }
            sequence.num_tokens += 1;
            let full = sequence.num_tokens >= limits.max_model_len.min(limits.num_slots);
            if is_last.next().is_some_and(|last| *last) || full {
                memory.give_back(sequence.start, sequence.reserved);
                ended.push(Ended { request: sequence.place, ..Ended::default() });
                return false;
            }
            true
        });
        Ok(ended)
    }
}
