//! Which bytes go in which message: a pure function of lengths and the number of ranks, so the same on every rank.

use core::ops::Range;

use crate::share;

/// Bytes that are received, reduced and sent on in one go: they stay in a level 2 cache, and a message of them is large
/// enough that its overhead does not show.
pub(super) const CHUNK_BYTES: usize = 256 * 1024;

/// Bytes of a list of buffers that go in one message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Chunk {
    /// As (buffer, bytes), in list order.
    pub(super) parts: Vec<(usize, Range<usize>)>,
    pub(super) num_bytes: usize,
}

impl Chunk {
    /// Its parts, with the place of each in the message.
    pub(super) fn places(&self) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
        let mut start = 0;
        self.parts.iter().map(move |(index, range)| {
            let place = start..start + range.len();
            start = place.end;
            (*index, range.clone(), place)
        })
    }
}

/// The chunks of each rank's share of a list of buffers.
pub(super) fn shares(num_bytes: &[usize], world_size: usize) -> Vec<Vec<Chunk>> {
    let pieces = |rank| share::pieces(num_bytes.iter().copied(), rank, world_size);
    (0..world_size).map(|rank| chunks(pieces(rank))).collect()
}

/// Cuts a stretch of one buffer into chunks.
pub(super) fn stretch(range: Range<usize>) -> Vec<Chunk> {
    chunks([(0, range)].into_iter().filter(|(_, range)| !range.is_empty()))
}

/// Fills chunks one after the other. Starts of pieces are multiples of an element, and so is what a chunk holds of one.
fn chunks(pieces: impl Iterator<Item = (usize, Range<usize>)>) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    let mut open = Chunk::default();
    for (index, mut range) in pieces {
        while !range.is_empty() {
            let room = CHUNK_BYTES - open.num_bytes;
            // Whole elements of any dtype, unless the piece ends.
            let take = if range.len() <= room { range.len() } else { room - room % 8 };
            if take > 0 {
                open.parts.push((index, range.start..range.start + take));
                open.num_bytes += take;
                range.start += take;
            }
            if !range.is_empty() {
                chunks.push(core::mem::take(&mut open));
            }
        }
    }
    if open.num_bytes > 0 {
        chunks.push(open);
    }
    chunks
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunks_tile_every_buffer_in_order(
            num_bytes in prop::collection::vec(prop_oneof![0usize..100, 0usize..2_000_000], 0..8),
            world_size in 1usize..6,
        ) {
            let mut next = vec![0; num_bytes.len()];
            for chunk in shares(&num_bytes, world_size).into_iter().flatten() {
                prop_assert!(chunk.num_bytes > 0 && chunk.num_bytes <= CHUNK_BYTES);
                let mut place_start = 0;
                for (index, range, place) in chunk.places() {
                    prop_assert_eq!(range.start, next[index]);
                    prop_assert_eq!(range.start % 8, 0);
                    prop_assert_eq!((place.start, place.len()), (place_start, range.len()));
                    (next[index], place_start) = (range.end, place.end);
                }
                prop_assert_eq!(place_start, chunk.num_bytes);
            }
            prop_assert_eq!(next, num_bytes);
        }
    }

    #[test]
    fn small_buffers_share_a_chunk_and_large_ones_are_cut() {
        let small = shares(&[40; 100], 2);
        assert_eq!((small[0].len(), small[0][0].parts.len()), (1, 50));
        let large = shares(&[4 * CHUNK_BYTES], 2);
        assert!(large.iter().all(|share| share.len() == 2 && share.iter().all(|chunk| chunk.parts.len() == 1)));
        assert_eq!(stretch(8..8), []);
    }
}
