//! Placeholder until the free list is in place.
fn main() {}
