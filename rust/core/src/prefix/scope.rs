//! What may share: sequences hit each other's blocks only within one scope.
//!
//! A scope is the caller's own bytes (model, adapter and its load generation, tenant, salt, framed so that two different
//! ones never give the same bytes). It binds in the first block: every later block hangs below one that is bound.

use hashbrown::HashMap;

/// A scope that is in use, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScopeId(u32);

impl ScopeId {
    pub(crate) const fn get(self) -> u32 {
        self.0
    }
}

#[derive(Debug)]
struct Entry {
    bytes: Box<[u8]>,
    users: usize,
}

/// Numbers for the scopes that are in use; a number is free again when its last user is gone.
#[derive(Debug, Default)]
pub(crate) struct Scopes {
    by_bytes: HashMap<Box<[u8]>, ScopeId>,
    entries: Vec<Option<Entry>>,
    vacant: Vec<ScopeId>,
}

impl Scopes {
    /// The number of a scope, with one more user.
    pub(crate) fn enter(&mut self, bytes: &[u8]) -> ScopeId {
        if let Some(&scope) = self.by_bytes.get(bytes) {
            self.join(scope);
            return scope;
        }
        let scope = self.vacant.pop().unwrap_or(ScopeId(self.entries.len() as u32));
        let entry = Some(Entry { bytes: bytes.into(), users: 1 });
        match self.entries.get_mut(scope.0 as usize) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
        self.by_bytes.insert(bytes.into(), scope);
        scope
    }

    /// One more user of a scope that is in use.
    pub(crate) fn join(&mut self, scope: ScopeId) {
        self.entries[scope.0 as usize].as_mut().expect("a scope in use has an entry").users += 1;
    }

    /// One user less.
    pub(crate) fn leave(&mut self, scope: ScopeId) {
        let place = &mut self.entries[scope.0 as usize];
        let entry = place.as_mut().expect("a scope in use has an entry");
        entry.users -= 1;
        if entry.users == 0 {
            self.by_bytes.remove(&entry.bytes);
            *place = None;
            self.vacant.push(scope);
        }
    }

    /// Scopes in use.
    pub(crate) fn len(&self) -> usize {
        self.by_bytes.len()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

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
}
