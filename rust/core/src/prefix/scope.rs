//! What may share: sequences hit each other's blocks only within one scope.
//!
//! A scope is the caller's own bytes (model, adapter and its load generation, tenant, salt, framed so that two different
//! ones never give the same bytes). It binds in the first block: every later block hangs below one that is bound.
//!
//! Media stand in a prompt as placeholder tokens, which say nothing of what is shown. So the block in which a medium
//! begins is bound once more, by the medium's hash and its offset: whoever hits that block, or any below, has the same
//! medium at the same place.

use std::cmp::Ordering;

use hashbrown::HashMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Error, Result};
use crate::units::BlockSize;

/// A scope that is in use, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScopeId(u32);

/// Marks the number of one sequence's own scope: a base and where media bind.
const HAS_MEDIA: u32 = 1 << 31;

impl ScopeId {
    /// That of a block which binds nothing: what it hangs below has bound it.
    pub(crate) const UNBOUND: Self = Self(HAS_MEDIA - 1);

    /// The number itself.
    pub(crate) const fn get(self) -> u32 {
        self.0
    }

    fn index(self) -> usize {
        (self.0 & !HAS_MEDIA) as usize
    }

    const fn has_media(self) -> bool {
        self.0 & HAS_MEDIA != 0
    }
}

/// A medium in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Media<'a> {
    /// Its first placeholder token.
    pub offset: usize,
    /// What it is, by a hash that two different ones never share.
    pub hash: &'a [u8],
}

/// The most bytes of a medium's hash.
const MAX_HASH_BYTES: usize = 64;

impl Media<'_> {
    /// Checks the media of a prompt of so many tokens.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] with the first that is not allowed.
    pub fn check(media: &[Media<'_>], prompt: usize) -> Result<()> {
        for (index, medium) in media.iter().enumerate() {
            let least = index.checked_sub(1).map_or(0, |before| media[before].offset + 1);
            if !(least..prompt).contains(&medium.offset) {
                let value = format!("offset {} at place {index}", medium.offset);
                let allowed = format!("rising offsets below the prompt's {prompt} tokens");
                return Err(Error::request("media", value, allowed));
            }
            if !(1..=MAX_HASH_BYTES).contains(&medium.hash.len()) {
                let value = format!("a hash of {} bytes at place {index}", medium.hash.len());
                return Err(Error::request("media", value, format!("hashes of 1 to {MAX_HASH_BYTES} bytes")));
            }
        }
        Ok(())
    }
}

#[derive(Debug)]
enum Kind {
    /// The caller's bytes.
    Base,
    /// The caller's bytes, so many of them, and the media that begin in one block.
    Media { base_len: usize },
    /// One sequence's: its base, and the blocks in which media begin, in order, with their scopes.
    Sequence { base: ScopeId, blocks: Box<[(usize, ScopeId)]> },
}

#[derive(Debug)]
struct Entry {
    kind: Kind,
    bytes: Box<[u8]>,
    fingerprint: u64,
    users: usize,
}

/// Numbers for the scopes that are in use; a number is free again when its last user is gone.
#[derive(Debug, Default)]
pub(crate) struct Scopes {
    bases: HashMap<Box<[u8]>, ScopeId>,
    media: HashMap<Box<[u8]>, ScopeId>,
    entries: Vec<Option<Entry>>,
    vacant: Vec<ScopeId>,
}

impl Scopes {
    /// The number of a scope, with one more user.
    pub(crate) fn enter(&mut self, bytes: &[u8]) -> ScopeId {
        if let Some(&scope) = self.bases.get(bytes) {
            self.join(scope);
            return scope;
        }
        let scope = self.add(Kind::Base, bytes.into());
        self.bases.insert(bytes.into(), scope);
        scope
    }

    /// The number of a sequence's scope whose prompt holds media, by rising offset.
    pub(crate) fn enter_with_media(&mut self, bytes: &[u8], media: &[Media<'_>], size: BlockSize) -> ScopeId {
        let base = self.enter(bytes);
        if media.is_empty() {
            return base;
        }
        let same_block =
            |a: &Media<'_>, b: &Media<'_>| size.full_blocks(a.offset) == size.full_blocks(b.offset);
        let blocks = media.chunk_by(same_block).map(|media| {
            let framed = frame(bytes, media, size);
            (size.full_blocks(media[0].offset), self.enter_block(framed, bytes.len()))
        });
        let kind = Kind::Sequence { base, blocks: blocks.collect() };
        ScopeId(self.add(kind, Box::default()).0 | HAS_MEDIA)
    }

    fn enter_block(&mut self, framed: Box<[u8]>, base_len: usize) -> ScopeId {
        if let Some(&scope) = self.media.get(&framed) {
            self.join(scope);
            return scope;
        }
        let scope = self.add(Kind::Media { base_len }, framed.clone());
        self.media.insert(framed, scope);
        scope
    }

    fn add(&mut self, kind: Kind, bytes: Box<[u8]>) -> ScopeId {
        let scope = self.vacant.pop().unwrap_or(ScopeId(self.entries.len() as u32));
        // Odd, so that it differs from the 0 of a block that binds nothing.
        let fingerprint = xxh3_64(&bytes) | 1;
        let entry = Some(Entry { kind, bytes, fingerprint, users: 1 });
        match self.entries.get_mut(scope.index()) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
        scope
    }

    /// What a sequence's block binds: a scope and its fingerprint, or [`ScopeId::UNBOUND`] and 0.
    #[inline]
    pub(crate) fn of_block(&self, scope: ScopeId, index: usize) -> (ScopeId, u64) {
        if index > 0 && !scope.has_media() {
            (ScopeId::UNBOUND, 0)
        } else {
            self.of_bound_block(scope, index)
        }
    }

    /// The same of a first block, or where media are.
    fn of_bound_block(&self, scope: ScopeId, index: usize) -> (ScopeId, u64) {
        let mut own = if index == 0 { scope } else { ScopeId::UNBOUND };
        if let Kind::Sequence { base, blocks } = &self.entry(scope).kind {
            own = if index == 0 { *base } else { ScopeId::UNBOUND };
            if let Ok(place) = blocks.binary_search_by_key(&index, |&(block, _)| block) {
                own = blocks[place].1;
            }
        }
        (own, if own == ScopeId::UNBOUND { 0 } else { self.entry(own).fingerprint })
    }

    /// The first block in which two sequences bind different things, if any ([`usize::MAX`] if none), and which of the two
    /// stands first in some order.
    pub(crate) fn compare(&self, first: ScopeId, second: ScopeId) -> (usize, Ordering) {
        let own = [first, second].map(|scope| self.of_block(scope, 0).0);
        if own[0] != own[1] {
            return (0, own[0].cmp(&own[1]));
        }
        let (first, second) = (self.media_blocks(first), self.media_blocks(second));
        let same = first.iter().zip(second).take_while(|(first, second)| first == second).count();
        match (first.get(same), second.get(same)) {
            (Some(first), Some(second)) if first.0 == second.0 => (first.0, first.1.cmp(&second.1)),
            // Who binds nothing there stands last.
            (Some(first), second) if second.is_none_or(|second| first.0 < second.0) => {
                (first.0, Ordering::Less)
            }
            (_, Some(second)) => (second.0, Ordering::Greater),
            _ => (usize::MAX, Ordering::Equal),
        }
    }

    /// The blocks of a sequence in which media begin, in order, with their scopes.
    fn media_blocks(&self, scope: ScopeId) -> &[(usize, ScopeId)] {
        match &self.entry(scope).kind {
            Kind::Sequence { blocks, .. } => blocks,
            Kind::Base | Kind::Media { .. } => &[],
        }
    }

    /// The bytes of a sequence's scope, media aside.
    pub(crate) fn base(&self, scope: ScopeId) -> &[u8] {
        match &self.entry(scope).kind {
            Kind::Sequence { base, .. } => self.base(*base),
            Kind::Base | Kind::Media { .. } => &self.entry(scope).bytes,
        }
    }

    /// The framed media that begin in a block, given its scope.
    pub(crate) fn media_of(&self, scope: ScopeId) -> &[u8] {
        if scope == ScopeId::UNBOUND {
            return &[];
        }
        let Entry { kind, bytes, .. } = self.entry(scope);
        match kind {
            Kind::Media { base_len } => &bytes[size_of::<u64>() + base_len..],
            Kind::Base | Kind::Sequence { .. } => &[],
        }
    }

    /// One more user of a scope that is in use.
    pub(crate) fn join(&mut self, scope: ScopeId) {
        self.entries[scope.index()].as_mut().expect("a scope in use has an entry").users += 1;
    }

    /// One user less.
    pub(crate) fn leave(&mut self, scope: ScopeId) {
        let place = &mut self.entries[scope.index()];
        let entry = place.as_mut().expect("a scope in use has an entry");
        entry.users -= 1;
        if entry.users > 0 {
            return;
        }
        let entry = place.take().expect("it was there");
        self.vacant.push(ScopeId(scope.index() as u32));
        match entry.kind {
            Kind::Base => drop(self.bases.remove(&entry.bytes)),
            Kind::Media { .. } => drop(self.media.remove(&entry.bytes)),
            Kind::Sequence { base, blocks } => {
                blocks.iter().for_each(|&(_, block)| self.leave(block));
                self.leave(base);
            }
        }
    }

    /// Scopes in use, those of blocks with media included.
    pub(crate) fn len(&self) -> usize {
        self.bases.len() + self.media.len()
    }

    fn entry(&self, scope: ScopeId) -> &Entry {
        self.entries[scope.index()].as_ref().expect("a scope in use has an entry")
    }
}

/// The base and the media of one block, such that no two different ones give the same bytes.
fn frame(base: &[u8], media: &[Media<'_>], size: BlockSize) -> Box<[u8]> {
    let mut framed = Vec::new();
    framed.extend((base.len() as u64).to_le_bytes());
    framed.extend(base);
    frame_media(&mut framed, media, size);
    framed.into()
}

/// The media that begin in one block: each one's offset in it, and its hash with its length.
pub(super) fn frame_media(framed: &mut Vec<u8>, media: &[Media<'_>], size: BlockSize) {
    for medium in media {
        framed.extend((size.offset(medium.offset) as u64).to_le_bytes());
        framed.extend((medium.hash.len() as u64).to_le_bytes());
        framed.extend(medium.hash);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn size() -> BlockSize {
        BlockSize::new(4).unwrap()
    }

    #[test]
    fn equal_bytes_are_one_scope_and_its_number_is_free_after_the_last_user() {
        let mut scopes = Scopes::default();
        let (a, b) = (scopes.enter(b"a"), scopes.enter(b"b"));
        assert_ne!(a, b);
        assert_eq!(scopes.enter(b"a"), a);
        scopes.leave(a);
        scopes.leave(a);
        assert_eq!(scopes.len(), 1);
        assert_eq!(scopes.enter(b"c"), a);
    }

    #[test]
    fn only_the_block_in_which_a_medium_begins_is_bound_by_it() {
        let mut scopes = Scopes::default();
        let media = [Media { offset: 5, hash: b"cat" }, Media { offset: 12, hash: b"dog" }];
        let base = scopes.enter(b"s");
        let scope = scopes.enter_with_media(b"s", &media, size());
        let bound: Vec<ScopeId> = (0..5).map(|index| scopes.of_block(scope, index).0).collect();
        let unbound = ScopeId::UNBOUND;
        assert_eq!((bound[0], bound[2], bound[4]), (base, unbound, unbound));
        assert!(bound[1] != unbound && bound[3] != unbound && bound[1] != bound[3]);
        assert_eq!((scopes.base(scope), scopes.media_of(base)), (&b"s"[..], &[][..]));
        assert!(scopes.media_of(bound[1]).starts_with(&1u64.to_le_bytes()));
        assert!(scopes.media_of(bound[1]).ends_with(b"cat"));
        let binds: Vec<bool> = (0..5).map(|index| scopes.of_block(scope, index).1 != 0).collect();
        assert_eq!(binds, [true, true, false, true, false]);
        scopes.leave(scope);
        scopes.leave(base);
        assert_eq!(scopes.len(), 0);
    }

    #[test]
    fn the_first_block_that_binds_otherwise_is_found_and_orders_sequences() {
        let mut scopes = Scopes::default();
        let media = |offset, hash| Media { offset, hash };
        let cases: [(&[u8], &[Media<'_>]); 7] = [
            (b"s", &[]),
            (b"t", &[]),
            (b"s", &[media(1, b"cat")]),
            (b"s", &[media(5, b"cat")]),
            (b"s", &[media(5, b"dog")]),
            (b"s", &[media(5, b"cat"), media(9, b"dog")]),
            (b"s", &[media(9, b"dog")]),
        ];
        let ids = cases.map(|(base, media)| scopes.enter_with_media(base, media, size()));
        let bound = |scope| (0..4).map(|index| scopes.of_block(scope, index).0).collect::<Vec<_>>();
        for (a, b) in ids.into_iter().flat_map(|a| ids.map(|b| (a, b))) {
            let first = bound(a).iter().zip(&bound(b)).position(|(a, b)| a != b);
            // What is unbound has the largest number: the order is that of the blocks' scopes.
            let expected = (first.unwrap_or(usize::MAX), bound(a).cmp(&bound(b)));
            assert_eq!(scopes.compare(a, b), expected);
        }
    }

    #[test]
    fn no_two_different_media_have_one_scope() {
        let mut scopes = Scopes::default();
        let media = |offset, hash| [Media { offset, hash }];
        let mut seen = Vec::new();
        for (base, media) in [
            (&b"s"[..], media(1, b"cat")),
            (b"s", media(2, b"cat")),
            (b"s", media(1, b"cats")),
            (b"sc", media(1, b"at")),
            (b"", media(1, b"cat")),
        ] {
            let scope = scopes.enter_with_media(base, &media, size());
            let (block, fingerprint) = scopes.of_block(scope, 0);
            seen.push((block, fingerprint));
        }
        seen.sort_unstable();
        seen.dedup_by_key(|&mut (block, _)| block);
        assert_eq!(seen.len(), 5);
    }
}
