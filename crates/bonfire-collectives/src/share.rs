//! Which bytes of a list of buffers each rank works on.

use core::ops::Range;

/// Cuts between ranks fall on multiples of this within a buffer: whole elements, and mostly whole cache lines.
const CUT_BYTES: usize = 64;

/// The pieces of a list of buffers that are `rank`'s share, as (buffer, bytes); the shares of all ranks tile the list.
///
/// A share is one contiguous stretch of the buffers laid end to end, so that a list of many small buffers
/// is dealt out whole and a large one is split evenly.
pub(crate) fn pieces(
    num_bytes: impl Iterator<Item = usize> + Clone,
    rank: usize,
    world_size: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let total: usize = num_bytes.clone().sum();
    // The product of two usizes fits u128, and the quotient is at most `total`.
    let cut = |rank: usize| (total as u128 * rank as u128 / world_size as u128) as usize;
    let (from, to) = (cut(rank), cut(rank + 1));
    let starts = num_bytes.clone().scan(0, |next, length| {
        let start = *next;
        *next += length;
        Some(start)
    });
    num_bytes.zip(starts).enumerate().filter_map(move |(index, (length, start))| {
        let range = within(start, length, from)..within(start, length, to);
        (!range.is_empty()).then_some((index, range))
    })
}

/// The part of a buffer of `length` bytes at `start` that lies before `cut`.
fn within(start: usize, length: usize, cut: usize) -> usize {
    let before = cut.saturating_sub(start);
    if before >= length { length } else { before - before % CUT_BYTES }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_shares_of_all_ranks_tile_every_buffer(
            num_bytes in prop::collection::vec(0usize..1000, 0..12),
            world_size in 1usize..9,
        ) {
            let mut next = vec![0; num_bytes.len()];
            for rank in 0..world_size {
                for (index, range) in pieces(num_bytes.iter().copied(), rank, world_size) {
                    prop_assert_eq!(range.start, next[index]);
                    prop_assert_eq!(range.start % CUT_BYTES, 0);
                    next[index] = range.end;
                }
            }
            prop_assert_eq!(next, num_bytes);
        }
    }

    #[test]
    fn a_large_buffer_is_split_evenly() {
        let share = |rank| pieces([1 << 20].into_iter(), rank, 4).collect::<Vec<_>>();
        assert_eq!(share(0), [(0, 0..1 << 18)]);
        assert_eq!(share(3), [(0, 3 << 18..1 << 20)]);
    }

    #[test]
    fn small_buffers_are_dealt_out_whole() {
        let share = |rank| pieces([40, 40, 40, 40].into_iter(), rank, 2).collect::<Vec<_>>();
        assert_eq!(share(0), [(0, 0..40), (1, 0..40)]);
        assert_eq!(share(1), [(2, 0..40), (3, 0..40)]);
    }
}
