//! Idle blocks in lanes, each in the order in which its blocks were last used.
//!
//! The lanes of a *set* are emptied one after the other, the lowest first; within a lane the oldest goes first. One set
//! holds all blocks; where tenants have shares of the cache, each has a further set with its own.
//!
//! A lane keeps the blocks of each *use* in a list of their own, so that a block that comes from another lane finds its
//! place by when it was used. Finding a use, or the oldest, takes time logarithmic in the uses of the lane; all else takes
//! constant time.

use std::collections::BTreeMap;

use crate::units::BlockId;

/// Lanes of a set: a bit of a word each.
pub(crate) const LANES: usize = 64;

const UNLISTED: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Links {
    older: u32,
    younger: u32,
    /// The list, or `UNLISTED`.
    list: u32,
}

impl Links {
    /// What belongs to no list: alone, or a list's anchor while the list is empty.
    fn alone(place: u32) -> Self {
        Self { older: place, younger: place, list: UNLISTED }
    }
}

/// The blocks of one lane that were last used together.
#[derive(Clone, Copy, Debug)]
struct List {
    /// The lane over all sets.
    lane: u32,
    used: u64,
    len: u32,
}

#[derive(Clone, Debug, Default)]
struct Lane {
    /// The lists, by use. None is empty.
    lists: BTreeMap<u64, u32>,
    len: usize,
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
    /// The blocks, then each list's anchor: its `younger` is the list's oldest block, its `older` the youngest.
    links: Vec<Links>,
    num_blocks: u32,
    lists: Vec<List>,
    vacant: Vec<u32>,
    lanes: Vec<Lane>,
    sets: Vec<Set>,
}

impl Lanes {
    /// No set yet, for the blocks of a pool.
    pub(crate) fn new(num_blocks: usize) -> Self {
        let num_blocks = num_blocks as u32;
        let mut links = Vec::with_capacity(num_blocks as usize + LANES);
        links.extend((0..num_blocks).map(Links::alone));
        let (lists, vacant, lanes, sets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { links, num_blocks, lists, vacant, lanes, sets }
    }

    /// Adds an empty set. Sets are numbered from 0.
    pub(crate) fn add_set(&mut self) {
        self.sets.push(Set::default());
        self.lanes.resize(self.sets.len() * LANES, Lane::default());
    }

    /// Blocks of a set.
    pub(crate) fn len(&self, set: usize) -> usize {
        self.sets[set].len
    }

    /// Blocks of one lane of a set.
    pub(crate) fn lane_len(&self, set: usize, lane: usize) -> usize {
        self.lanes[set * LANES + lane].len
    }

    /// The lane in which a block waits, in whichever set.
    pub(crate) fn lane(&self, block: BlockId) -> Option<usize> {
        self.list(block).map(|list| list.lane as usize % LANES)
    }

    /// The set in which a block waits.
    pub(crate) fn set(&self, block: BlockId) -> Option<usize> {
        self.list(block).map(|list| list.lane as usize / LANES)
    }

    /// The use by which a block waits.
    pub(crate) fn used(&self, block: BlockId) -> Option<u64> {
        self.list(block).map(|list| list.used)
    }

    /// Lists a block as the youngest of those of a lane that were used when it was, or before. It is in no list.
    pub(crate) fn insert(&mut self, block: BlockId, set: usize, lane: usize, used: u64) {
        let list = self.list_of(set * LANES + lane, used);
        self.link(block, self.num_blocks + list, list);
    }

    /// The same, but before the block `above` if that is in the same lane and was not used later.
    pub(crate) fn insert_in_order(
        &mut self,
        block: BlockId,
        set: usize,
        lane: usize,
        used: u64,
        above: Option<BlockId>,
    ) {
        let is_behind = |list: &List| list.lane as usize == set * LANES + lane && list.used <= used;
        match above.filter(|&above| self.list(above).is_some_and(is_behind)) {
            Some(above) => self.link(block, above.get(), self.links[above.index()].list),
            None => self.insert(block, set, lane, used),
        }
    }

    /// Takes a listed block out, wherever it stands.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let Links { older, younger, list } = self.links[block.index()];
        self.links[block.index()] = Links::alone(block.get());
        self.links[older as usize].younger = younger;
        self.links[younger as usize].older = older;
        let entry = &mut self.lists[list as usize];
        entry.len -= 1;
        let List { lane: place, used, len } = *entry;
        let (place, lane) = (place as usize, &mut self.lanes[place as usize]);
        if len == 0 {
            lane.lists.remove(&used);
            self.vacant.push(list);
        }
        lane.len -= 1;
        let set = &mut self.sets[place / LANES];
        if lane.len == 0 {
            set.occupied &= !(1 << (place % LANES));
        }
        set.len -= 1;
    }

    /// Takes all blocks out. The sets stay.
    pub(crate) fn clear(&mut self) {
        self.links.truncate(self.num_blocks as usize);
        (0..).zip(&mut self.links).for_each(|(place, links)| *links = Links::alone(place));
        self.lists.clear();
        self.vacant.clear();
        self.lanes.fill(Lane::default());
        self.sets.fill(Set::default());
    }

    /// The oldest block of a set's lowest lane, and that lane.
    pub(crate) fn first(&self, set: usize) -> Option<(BlockId, usize)> {
        let occupied = self.sets[set].occupied;
        let lane = occupied.trailing_zeros() as usize;
        (occupied != 0).then(|| (self.oldest(set, lane).expect("an occupied lane has a block"), lane))
    }

    /// The oldest block of a lane.
    pub(crate) fn oldest(&self, set: usize, lane: usize) -> Option<BlockId> {
        let (_, &list) = self.lanes[set * LANES + lane].lists.first_key_value()?;
        self.block(self.links[(self.num_blocks + list) as usize].younger)
    }

    /// The blocks of a set in the order in which they would go.
    pub(crate) fn iter(&self, set: usize) -> impl Iterator<Item = BlockId> {
        let lists = self.lanes[set * LANES..][..LANES].iter().flat_map(|lane| lane.lists.values());
        lists.flat_map(|list| {
            let oldest = self.block(self.links[(self.num_blocks + list) as usize].younger);
            std::iter::successors(oldest, |block| self.block(self.links[block.index()].younger))
        })
    }

    fn list(&self, block: BlockId) -> Option<&List> {
        // No list has the number of none.
        self.lists.get(self.links[block.index()].list as usize)
    }

    /// The list of a use in a lane over all sets; a new one if there is none.
    fn list_of(&mut self, place: usize, used: u64) -> u32 {
        let lists = &mut self.lanes[place].lists;
        let youngest = lists.last_key_value().filter(|&(&youngest, _)| youngest == used);
        if let Some(&list) = youngest.map(|(_, list)| list).or_else(|| lists.get(&used)) {
            return list;
        }
        let list = List { lane: place as u32, used, len: 0 };
        let id = self.vacant.pop().unwrap_or(self.lists.len() as u32);
        match self.lists.get_mut(id as usize) {
            Some(entry) => *entry = list,
            None => {
                self.lists.push(list);
                self.links.push(Links::alone(self.num_blocks + id));
            }
        }
        lists.insert(used, id);
        id
    }

    /// Puts a block right before a place of its list.
    fn link(&mut self, block: BlockId, place: u32, list: u32) {
        let older = self.links[place as usize].older;
        self.links[block.index()] = Links { older, younger: place, list };
        self.links[older as usize].younger = block.get();
        self.links[place as usize].older = block.get();
        let entry = &mut self.lists[list as usize];
        entry.len += 1;
        let place = entry.lane as usize;
        self.lanes[place].len += 1;
        let set = &mut self.sets[place / LANES];
        set.occupied |= 1 << (place % LANES);
        set.len += 1;
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
        blocks.iter().for_each(|&(id, lane)| lanes.insert(BlockId::new(id), 0, lane, 0));
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
            lanes.insert(BlockId::new(removed), 0, 3, 0);
            assert_eq!((lanes.len(0), lanes.lane_len(0, 3)), (3, 3));
            assert_eq!(ids(&lanes)[2], removed);
        }
    }

    #[test]
    fn sets_are_apart() {
        let mut lanes = lanes(&[(5, 1)]);
        lanes.add_set();
        lanes.insert(BlockId::new(2), 1, 1, 0);
        assert_eq!((lanes.first(0).unwrap().0.get(), lanes.first(1).unwrap().0.get()), (5, 2));
        lanes.remove(BlockId::new(2));
        assert_eq!((lanes.first(1), lanes.len(1), lanes.lane(BlockId::new(5))), (None, 0, Some(1)));
    }

    #[test]
    fn a_block_finds_its_place_among_those_used_before_and_after_it() {
        let mut lanes = lanes(&[]);
        for (id, used) in [(1, 3), (2, 5), (3, 9), (4, 4), (5, 5), (6, 3), (7, 12)] {
            lanes.insert(BlockId::new(id), 0, 2, used);
        }
        assert_eq!(ids(&lanes), [1, 6, 4, 2, 5, 3, 7]);
        lanes.insert_in_order(BlockId::new(8), 0, 2, 6, Some(BlockId::new(5)));
        lanes.insert_in_order(BlockId::new(9), 0, 2, 4, Some(BlockId::new(5)));
        assert_eq!(ids(&lanes), [1, 6, 4, 9, 2, 8, 5, 3, 7]);
        assert_eq!(lanes.used(BlockId::new(8)), Some(5));
        for (removed, oldest) in [(1, 6), (6, 4), (4, 9), (9, 2)] {
            lanes.remove(BlockId::new(removed));
            assert_eq!(lanes.first(0), Some((BlockId::new(oldest), 2)));
        }
        // Lists that were emptied are used again.
        let num_lists = lanes.lists.len();
        lanes.insert(BlockId::new(1), 0, 1, 7);
        lanes.insert(BlockId::new(4), 0, 2, 1);
        assert_eq!((ids(&lanes), lanes.lists.len()), (vec![1, 4, 2, 8, 5, 3, 7], num_lists));
        assert_eq!((lanes.len(0), lanes.lane_len(0, 2)), (7, 6));
    }
}
