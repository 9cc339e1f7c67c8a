//! Idle blocks in lanes, each in the order in which its blocks were last used: every operation takes constant time.
//!
//! The lanes of a *set* are emptied one after the other, the lowest first; within a lane the oldest goes first. One set
//! holds all blocks; where tenants have shares of the cache, each has a further set with its own.

use crate::units::BlockId;

/// Lanes of a set: a bit of a word each.
pub(crate) const LANES: usize = 64;

const UNLISTED: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Links {
    older: u32,
    younger: u32,
    /// The lane over all sets, or `UNLISTED`.
    lane: u32,
}

impl Links {
    /// What belongs to no list: alone, or a lane's anchor while the lane is empty.
    fn alone(place: u32) -> Self {
        Self { older: place, younger: place, lane: UNLISTED }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Set {
    /// A bit for each lane that is not empty.
    occupied: u64,
    len: usize,
}

/// Doubly linked lists through one array.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// The blocks, then each lane's anchor: its `younger` is the lane's oldest block, its `older` the youngest.
    links: Vec<Links>,
    num_blocks: u32,
    sets: Vec<Set>,
    lane_lens: Vec<u32>,
}

impl Lanes {
    /// No set yet, for the blocks of a pool.
    pub(crate) fn new(num_blocks: usize) -> Self {
        let num_blocks = num_blocks as u32;
        let mut links = Vec::with_capacity(num_blocks as usize + LANES);
        links.extend((0..num_blocks).map(Links::alone));
        Self { links, num_blocks, sets: Vec::new(), lane_lens: Vec::new() }
    }

    /// Adds an empty set. Sets are numbered from 0.
    pub(crate) fn add_set(&mut self) {
        self.sets.push(Set::default());
        for _ in 0..LANES {
            self.links.push(Links::alone(self.links.len() as u32));
            self.lane_lens.push(0);
        }
    }

    /// Blocks of a set.
    pub(crate) fn len(&self, set: usize) -> usize {
        self.sets[set].len
    }

    /// Blocks of one lane of a set.
    pub(crate) fn lane_len(&self, set: usize, lane: usize) -> usize {
        self.lane_lens[set * LANES + lane] as usize
    }

    /// The lane in which a block waits, in whichever set.
    pub(crate) fn lane(&self, block: BlockId) -> Option<usize> {
        let lane = self.links[block.index()].lane;
        (lane != UNLISTED).then_some(lane as usize % LANES)
    }

    /// The set in which a block waits.
    pub(crate) fn set(&self, block: BlockId) -> Option<usize> {
        let lane = self.links[block.index()].lane;
        (lane != UNLISTED).then_some(lane as usize / LANES)
    }

    /// Lists a block as the youngest of a lane. It is in no list.
    pub(crate) fn insert(&mut self, block: BlockId, set: usize, lane: usize) {
        let lane = set * LANES + lane;
        let anchor = self.num_blocks + lane as u32;
        let youngest = self.links[anchor as usize].older;
        self.links[block.index()] = Links { older: youngest, younger: anchor, lane: lane as u32 };
        self.links[youngest as usize].younger = block.get();
        self.links[anchor as usize].older = block.get();
        self.lane_lens[lane] += 1;
        self.sets[set].occupied |= 1 << (lane % LANES);
        self.sets[set].len += 1;
    }

    /// Takes a listed block out, wherever it stands.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let Links { older, younger, lane } = self.links[block.index()];
        self.links[block.index()] = Links::alone(block.get());
        self.links[older as usize].younger = younger;
        self.links[younger as usize].older = older;
        let (lane, set) = (lane as usize, lane as usize / LANES);
        self.lane_lens[lane] -= 1;
        if self.lane_lens[lane] == 0 {
            self.sets[set].occupied &= !(1 << (lane % LANES));
        }
        self.sets[set].len -= 1;
    }

    /// The oldest block of a set's lowest lane, and that lane.
    pub(crate) fn first(&self, set: usize) -> Option<(BlockId, usize)> {
        let occupied = self.sets[set].occupied;
        let lane = occupied.trailing_zeros() as usize;
        (occupied != 0).then(|| (self.oldest(set, lane).expect("an occupied lane has a block"), lane))
    }

    /// The oldest block of a lane.
    pub(crate) fn oldest(&self, set: usize, lane: usize) -> Option<BlockId> {
        self.block(self.links[self.num_blocks as usize + set * LANES + lane].younger)
    }

    /// The blocks of a set in the order in which they would go.
    pub(crate) fn iter(&self, set: usize) -> impl Iterator<Item = BlockId> {
        (0..LANES).flat_map(move |lane| {
            std::iter::successors(self.oldest(set, lane), |block| {
                self.block(self.links[block.index()].younger)
            })
        })
    }

    /// A place of the array, if it is no anchor.
    fn block(&self, place: u32) -> Option<BlockId> {
        (place < self.num_blocks).then_some(BlockId::new(place))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn lanes(blocks: &[(u32, usize)]) -> Lanes {
        let mut lanes = Lanes::new(10);
        lanes.add_set();
        blocks.iter().for_each(|&(id, lane)| lanes.insert(BlockId::new(id), 0, lane));
        lanes
    }

    fn ids(lanes: &Lanes) -> Vec<u32> {
        lanes.iter(0).map(BlockId::get).collect()
    }

    #[test]
    fn the_lowest_lane_goes_first_and_in_it_the_oldest() {
        assert_eq!(lanes(&[(5, 1), (2, 0), (7, 0)]).first(0), Some((BlockId::new(2), 0)));
        assert_eq!(ids(&lanes(&[(5, 63), (2, 1), (7, 1), (3, 63)])), [2, 7, 5, 3]);
        assert_eq!(lanes(&[]).first(0), None);
    }

    #[test]
    fn a_block_is_removed_from_any_place() {
        for (removed, rest) in [(5, [2, 7]), (2, [5, 7]), (7, [5, 2])] {
            let mut lanes = lanes(&[(5, 3), (2, 3), (7, 3)]);
            lanes.remove(BlockId::new(removed));
            assert_eq!(ids(&lanes), rest);
            assert_eq!(lanes.lane(BlockId::new(removed)), None);
            lanes.insert(BlockId::new(removed), 0, 3);
            assert_eq!((lanes.len(0), lanes.lane_len(0, 3)), (3, 3));
            assert_eq!(ids(&lanes)[2], removed);
        }
    }

    #[test]
    fn sets_are_apart() {
        let mut lanes = lanes(&[(5, 1)]);
        lanes.add_set();
        lanes.insert(BlockId::new(2), 1, 1);
        assert_eq!((lanes.first(0).unwrap().0.get(), lanes.first(1).unwrap().0.get()), (5, 2));
        lanes.remove(BlockId::new(2));
        assert_eq!((lanes.first(1), lanes.len(1), lanes.lane(BlockId::new(5))), (None, 0, Some(1)));
    }
}
