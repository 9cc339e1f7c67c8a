//! Content keys: what a block is called outside of this process, for events, tiers and routers.
//!
//! A key is the BLAKE3 hash of everything that the block's content depends on, chained from the scope's root key. It is the
//! same in every process. The framing gives no two different inputs the same bytes:
//!
//! ```text
//! root  = hash(DOMAIN, 0, block size as u64, scope)
//! block = hash(DOMAIN, 1, parent's key, its tokens as u32, for each medium that begins in it: offset as u64,
//!              length of its hash as u64, its hash)
//! ```
//! Numbers are little-endian; a chain has one block size, so that each part has a length of its own or is the last.

use super::scope::{Media, frame_media};
use crate::units::{BlockSize, TokenId};

/// A block's key.
pub type ContentKey = [u8; 32];

const DOMAIN: &[u8] = b"pykv block content key 1";

/// The key that the first blocks of a scope hang below.
pub fn root_key(block_size: BlockSize, scope: &[u8]) -> ContentKey {
    let mut hasher = blake3::Hasher::new();
    hasher.update(DOMAIN).update(&[0]).update(&(block_size.tokens() as u64).to_le_bytes()).update(scope);
    *hasher.finalize().as_bytes()
}

/// The key of a full block below another one, given the framed media that begin in it.
pub(crate) fn block_key(parent: &ContentKey, tokens: &[TokenId], media: &[u8]) -> ContentKey {
    let mut hasher = blake3::Hasher::new();
    hasher.update(DOMAIN).update(&[1]).update(parent);
    if cfg!(target_endian = "little") {
        hasher.update(bytemuck::cast_slice(tokens));
    } else {
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
    }
    *hasher.update(media).finalize().as_bytes()
}

/// The keys of a prompt's full blocks, whose media come by rising offset.
pub fn content_keys(
    block_size: BlockSize,
    scope: &[u8],
    tokens: &[TokenId],
    media: &[Media<'_>],
) -> Vec<ContentKey> {
    let mut key = root_key(block_size, scope);
    let mut rest = media;
    let mut framed = Vec::new();
    let blocks = tokens.chunks_exact(block_size.tokens()).enumerate().map(|(index, run)| {
        let here = rest.partition_point(|medium| medium.offset < (index + 1) * block_size.tokens());
        framed.clear();
        frame_media(&mut framed, &rest[..here], block_size);
        rest = &rest[here..];
        key = block_key(&key, run, &framed);
        key
    });
    blocks.collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn size(tokens: usize) -> BlockSize {
        BlockSize::new(tokens).unwrap()
    }

    fn hex(key: ContentKey) -> String {
        key.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn keys_are_those_of_the_framing_that_is_written_down() {
        let mut bytes = b"pykv block content key 1\x00\x02\0\0\0\0\0\0\0scope".to_vec();
        let root = *blake3::hash(&bytes).as_bytes();
        assert_eq!(root_key(size(2), b"scope"), root);
        bytes = b"pykv block content key 1\x01".to_vec();
        bytes.extend(root);
        bytes.extend(b"\x05\0\0\0\x00\x01\0\0");
        bytes.extend(b"\x01\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0cat");
        let media = [Media { offset: 1, hash: b"cat" }];
        let keys = content_keys(size(2), b"scope", &[5, 256, 7], &media);
        assert_eq!(keys, [*blake3::hash(&bytes).as_bytes()]);
    }

    #[test]
    fn keys_are_the_same_in_every_process() {
        let keys = content_keys(size(4), b"", &[1, 2, 3, 4, 5, 6, 7, 8], &[]);
        assert_eq!(hex(keys[1]), KNOWN);
    }

    const KNOWN: &str = "7dd1f6b703f487449913d2fd22118e789dd24f278cdabc55afa6b0892fb5837f";

    #[test]
    fn no_two_different_inputs_have_one_key() {
        let cat = [Media { offset: 0, hash: b"cat" }];
        let cats = [Media { offset: 0, hash: b"cats" }];
        let later = [Media { offset: 1, hash: b"cat" }];
        let two = [Media { offset: 0, hash: b"c" }, Media { offset: 1, hash: b"t" }];
        let mut keys: Vec<ContentKey> = [
            (4, &b""[..], &[65, 65, 65, 65][..], &[][..]),
            (4, b"", &[321, 65, 65, 65], &[]),
            (4, b"", &[65 + (1 << 24), 65, 65, 65], &[]),
            (4, b"", &[0, 0, 0, 0], &[]),
            (4, b"\0", &[0, 0, 0, 0], &[]),
            (2, b"", &[0, 0], &[]),
            (1, b"", &[0], &[]),
            (2, b"", &[1, 23], &[]),
            (2, b"", &[12, 3], &[]),
            (2, b"", &[12, 3], &cat),
            (2, b"", &[12, 3], &cats),
            (2, b"", &[12, 3], &later),
            (2, b"", &[12, 3], &two),
        ]
        .map(|(block_size, scope, tokens, media)| content_keys(size(block_size), scope, tokens, media)[0])
        .into();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 13);
    }
}
