//! The frame of a recording: chunks with checksums, so that what is damaged or cut is known before a call is made.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::error::{Ending, ReplayError};
use super::{FORMAT, NAME};

/// What a chunk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Options = 0,
    Calls,
    End,
}

/// Bytes of a kind and a length.
const HEADER: usize = 1 + size_of::<u64>();
const CHECKSUM: usize = size_of::<u64>();
/// Bytes of an end mark: the number of calls.
const END: usize = HEADER + size_of::<u64>() + CHECKSUM;

/// Chunks that are written one after the other, the last one open.
#[derive(Debug)]
pub(super) struct ChunkWriter {
    bytes: Vec<u8>,
    /// Where the open chunk begins.
    open: usize,
    num_chunks: u64,
}

impl ChunkWriter {
    pub(super) fn new() -> Self {
        let mut writer = Self { bytes: [NAME, &[FORMAT]].concat(), open: 0, num_chunks: 0 };
        writer.begin();
        writer
    }

    /// What goes into the open chunk.
    pub(super) fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Bytes in the open chunk.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.open - HEADER
    }

    /// Closes the open chunk and begins the next one.
    pub(super) fn close(&mut self, kind: Kind) {
        let length = self.len() as u64;
        let header = &mut self.bytes[self.open..self.open + HEADER];
        header[0] = kind as u8;
        header[1..].copy_from_slice(&length.to_le_bytes());
        // The place in the recording is part of it: no chunk can be left out, doubled or moved.
        let checksum = xxh3_64_with_seed(&self.bytes[self.open..], self.num_chunks);
        self.bytes.extend(checksum.to_le_bytes());
        self.num_chunks += 1;
        self.begin();
    }

    /// The chunks that were closed since last asked. The open one must be empty.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.bytes.truncate(self.open);
        let taken = std::mem::take(&mut self.bytes);
        self.begin();
        taken
    }

    fn begin(&mut self) {
        self.open = self.bytes.len();
        self.bytes.extend([0; HEADER]);
    }
}

/// A chunk that is whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk<'a> {
    pub(super) kind: Kind,
    pub(super) bytes: &'a [u8],
    /// Where they are in the recording.
    pub(super) offset: usize,
}

/// The chunks of a recording up to its end, and whether that is lacking.
pub(super) fn chunks_of(bytes: &[u8], ending: Ending) -> Result<(Vec<Chunk<'_>>, bool), ReplayError> {
    let mut offset = check_name(bytes)?;
    let mut chunks: Vec<Chunk<'_>> = Vec::new();
    loop {
        let chunk = match next_chunk(bytes, offset, chunks.len() as u64) {
            Err(_) if ending == Ending::MayBeCut && !chunks.is_empty() => {
                check_cut(bytes, offset, chunks.len() as u64)?;
                return Ok((chunks, true));
            }
            chunk => chunk?,
        };
        let expected =
            if chunks.is_empty() { chunk.kind == Kind::Options } else { chunk.kind != Kind::Options };
        if !expected {
            return Err(ReplayError::Malformed { offset, problem: "this chunk does not belong here" });
        }
        offset = chunk.offset + chunk.bytes.len() + CHECKSUM;
        chunks.push(chunk);
        if chunk.kind == Kind::End {
            break;
        }
    }
    if offset < bytes.len() {
        return Err(ReplayError::Malformed { offset, problem: "something follows the end mark" });
    }
    Ok((chunks, false))
}

/// Checks that the chunk that is not whole is the last thing there is: a process that died left nothing behind it.
fn check_cut(bytes: &[u8], offset: usize, number: u64) -> Result<(), ReplayError> {
    let ends = bytes[offset..].last_chunk::<END>().is_some_and(|end| {
        let (kind, rest) = end.split_at(1);
        kind[0] == Kind::End as u8 && number_from(&rest[..HEADER - 1]) == size_of::<u64>() as u64
    });
    let length = bytes[offset..].get(1..HEADER).and_then(|length| usize::try_from(number_from(length)).ok());
    let next = length.and_then(|length| (offset + HEADER + CHECKSUM).checked_add(length));
    let goes_on = next.is_some_and(|next| next <= bytes.len() && next_chunk(bytes, next, number + 1).is_ok());
    if ends || goes_on {
        return Err(ReplayError::Malformed { offset, problem: "this chunk was damaged: others follow it" });
    }
    Ok(())
}

/// Returns where the first chunk begins.
fn check_name(bytes: &[u8]) -> Result<usize, ReplayError> {
    match bytes.strip_prefix(NAME) {
        Some([FORMAT, ..]) => Ok(NAME.len() + 1),
        Some([found, ..]) if found.is_ascii_digit() => {
            Err(ReplayError::Format { found: char::from(*found), read: char::from(FORMAT) })
        }
        _ => Err(ReplayError::Malformed { offset: 0, problem: "not a recording" }),
    }
}

fn next_chunk(bytes: &[u8], offset: usize, number: u64) -> Result<Chunk<'_>, ReplayError> {
    let rest = &bytes[offset..];
    let (header, after) = rest.split_at_checked(HEADER).ok_or(ReplayError::Cut { offset })?;
    let (kind, length) = (header[0], number_from(&header[1..]));
    let length = usize::try_from(length).ok().filter(|&length| length <= after.len());
    let length = length.ok_or(ReplayError::Cut { offset })?;
    let checksum = after[length..].get(..CHECKSUM).ok_or(ReplayError::Cut { offset })?;
    let damaged =
        ReplayError::Malformed { offset, problem: "the checksum of this chunk is wrong: it was damaged" };
    if xxh3_64_with_seed(&rest[..HEADER + length], number) != number_from(checksum) {
        return Err(damaged);
    }
    let kind = match kind {
        0 => Kind::Options,
        1 => Kind::Calls,
        2 => Kind::End,
        _ => return Err(damaged),
    };
    Ok(Chunk { kind, bytes: &after[..length], offset: offset + HEADER })
}

/// A number of 8 bytes.
pub(super) fn number_from(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}
