//! A cache whose order of eviction is given from outside: for policies that are tried, and for those that are told more
//! than the production tree is.

use std::collections::BTreeSet;

use super::Hits;
use crate::trace::{BlockNumber, Trace};

/// One request that has used the blocks of its prompt.
#[derive(Clone, Copy, Debug)]
pub struct Use<'a> {
    /// Which request, by its place in the trace.
    pub request: usize,
    /// The blocks of its prompt, as far as they are cached now.
    pub blocks: &'a [BlockNumber],
    /// How many of them were found.
    pub found: usize,
}

/// Decides in which order blocks are evicted.
pub trait Ranking {
    /// Why it could not decide.
    type Error;

    /// Gives each block of a use a rank, in order. Of the leaves that nobody uses, the one of the lowest rank is evicted
    /// first; among equals the one used least recently.
    ///
    /// # Errors
    /// Its own.
    fn rank(&mut self, used: Use<'_>, ranks: &mut Vec<f64>) -> Result<(), Self::Error>;

    /// Blocks used earlier whose rank is another one by the time that a request comes.
    fn changes(&mut self, _request: usize) -> Vec<(BlockNumber, f64)> {
        Vec::new()
    }
}

/// Replays a trace on a cache of `num_blocks` blocks that evicts by a ranking.
///
/// # Errors
/// Those of the ranking.
pub fn ranked<R: Ranking>(trace: &Trace, num_blocks: usize, ranking: &mut R) -> Result<Hits, R::Error> {
    let mut cache = Cache::new(trace.num_blocks(), num_blocks);
    let mut hits = Hits::default();
    let (mut chain, mut ranks) = (Vec::new(), Vec::new());
    for request in 0..trace.requests().len() {
        ranking.changes(request).into_iter().for_each(|(block, rank)| cache.change(block, rank));
        chain.clear();
        chain.extend(trace.blocks(request).take(num_blocks));
        let found = cache.insert(&chain, request as u32);
        hits.count(trace, request, found);
        ranks.clear();
        ranking.rank(Use { request, blocks: &chain, found }, &mut ranks)?;
        cache.release(&chain, &ranks);
    }
    hits.evictions = cache.evictions;
    Ok(hits)
}

/// The place of a leaf in the order of eviction: its rank, then the request that used it last, then its number.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Place(f64, u32, BlockNumber);

impl Eq for Place {}

impl PartialOrd for Place {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Place {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0).then_with(|| (self.1, self.2).cmp(&(other.1, other.2)))
    }
}

#[derive(Clone, Copy, Debug)]
struct Node {
    rank: f64,
    parent: Option<BlockNumber>,
    num_children: u32,
    last_use: u32,
    is_cached: bool,
}

const ABSENT: Node = Node { rank: 0.0, parent: None, num_children: 0, last_use: 0, is_cached: false };

/// Which blocks are cached, and the leaves among them that may be evicted.
struct Cache {
    nodes: Vec<Node>,
    leaves: BTreeSet<Place>,
    free: usize,
    evictions: u64,
}

impl Cache {
    fn new(num_symbols: usize, capacity: usize) -> Self {
        Self { nodes: vec![ABSENT; num_symbols], leaves: BTreeSet::new(), free: capacity, evictions: 0 }
    }

    /// Caches a chain, and pins it until it is released: what uses it counts as a child of its deepest block. Returns
    /// how much was there.
    fn insert(&mut self, chain: &[BlockNumber], request: u32) -> usize {
        let found = chain.iter().take_while(|&&block| self.node(block).is_cached).count();
        let mut parent = found.checked_sub(1).map(|index| chain[index]);
        if let Some(deepest) = parent {
            self.leaves.remove(&self.place(deepest));
            self.nodes[deepest as usize].num_children += 1;
        }
        for &block in &chain[found..] {
            self.make_room();
            self.free -= 1;
            self.nodes[block as usize] = Node { parent, is_cached: true, num_children: 1, ..ABSENT };
            parent = Some(block);
        }
        chain.iter().for_each(|&block| self.nodes[block as usize].last_use = request);
        found
    }

    fn make_room(&mut self) {
        if self.free > 0 {
            return;
        }
        if let Some(Place(_, _, block)) = self.leaves.pop_first() {
            let parent = self.node(block).parent;
            self.nodes[block as usize] = ABSENT;
            self.free += 1;
            self.evictions += 1;
            if let Some(parent) = parent {
                self.lose_child(parent);
            }
        }
    }

    /// Unpins a chain, with new ranks.
    fn release(&mut self, chain: &[BlockNumber], ranks: &[f64]) {
        for (&block, &rank) in chain.iter().zip(ranks) {
            self.nodes[block as usize].rank = rank;
        }
        if let Some(&deepest) = chain.last() {
            self.lose_child(deepest);
        }
    }

    fn change(&mut self, block: BlockNumber, rank: f64) {
        if self.node(block).is_cached {
            let was_listed = self.leaves.remove(&self.place(block));
            self.nodes[block as usize].rank = rank;
            if was_listed {
                self.leaves.insert(self.place(block));
            }
        }
    }

    /// Takes a child from a block, and lists it if that makes it a leaf.
    fn lose_child(&mut self, block: BlockNumber) {
        self.nodes[block as usize].num_children -= 1;
        if self.node(block).num_children == 0 {
            self.leaves.insert(self.place(block));
        }
    }

    fn place(&self, block: BlockNumber) -> Place {
        let node = self.node(block);
        Place(node.rank, node.last_use, block)
    }

    fn node(&self, block: BlockNumber) -> Node {
        self.nodes[block as usize]
    }
}
