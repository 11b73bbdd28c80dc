use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::PlacementError;

/// How many rows of a dim each rank holds; index = rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lengths(Arc<[usize]>);

/// How a dim is shared out among the ranks.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Shares {
    /// The same for each rank; what is left over goes to the lower ranks, one row each.
    #[default]
    Equal,
    /// In proportion to one weight per rank: largest remainder, ties to the lower rank.
    Weighted(Vec<u32>),
    /// Rank 0 gets this many rows (at most all of them), the others share the rest equally.
    First(usize),
}

impl Lengths {
    /// One length per rank.
    pub fn new(lengths: impl Into<Vec<usize>>) -> Self {
        Lengths(lengths.into().into())
    }

    /// How many ranks share the dim.
    pub fn world_size(&self) -> usize {
        self.0.len()
    }

    /// The length of the whole dim.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }

    /// How many rows `rank` holds.
    ///
    /// # Panics
    ///
    /// If `rank >= world_size`.
    pub fn of(&self, rank: usize) -> usize {
        self.0[rank]
    }

    /// The first row that `rank` holds, or would hold were its length not 0.
    ///
    /// # Panics
    ///
    /// If `rank > world_size`.
    pub fn offset(&self, rank: usize) -> usize {
        self.0[..rank].iter().sum()
    }

    /// The rows that `rank` holds.
    ///
    /// # Panics
    ///
    /// If `rank >= world_size`.
    pub fn range(&self, rank: usize) -> Range<usize> {
        let start = self.offset(rank);
        start..start + self.of(rank)
    }

    /// The lengths in rank order.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }

    /// Each length times `numerator / denominator`; `None` unless all are whole numbers.
    pub fn scaled(&self, numerator: usize, denominator: usize) -> Option<Lengths> {
        if denominator == 0 {
            return None;
        }
        if numerator == denominator {
            return Some(self.clone());
        }
        let scale = |length: usize| {
            let scaled = length.checked_mul(numerator)?;
            scaled.is_multiple_of(denominator).then_some(scaled / denominator)
        };
        self.iter().map(scale).collect::<Option<_>>().map(Lengths)
    }
}

impl<T: Into<Vec<usize>>> From<T> for Lengths {
    fn from(lengths: T) -> Self {
        Lengths::new(lengths)
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl Shares {
    /// Checks all that does not depend on the length of a dim.
    ///
    /// # Errors
    ///
    /// - [`PlacementError::NoRanks`]: `world_size` is 0.
    /// - [`PlacementError::WeightCount`]: there is not one weight per rank.
    /// - [`PlacementError::ZeroWeights`]: all weights are 0.
    pub fn validate(&self, world_size: usize) -> Result<(), PlacementError> {
        if world_size == 0 {
            return Err(PlacementError::NoRanks);
        }
        match self {
            Shares::Weighted(weights) if weights.len() != world_size => {
                Err(PlacementError::WeightCount { num_weights: weights.len(), world_size })
            }
            Shares::Weighted(weights) if weights.iter().all(|&weight| weight == 0) => {
                Err(PlacementError::ZeroWeights { world_size })
            }
            Shares::Equal | Shares::Weighted(_) | Shares::First(_) => Ok(()),
        }
    }

    /// Shares out a dim of length `total`: every row once, in rank order.
    ///
    /// # Errors
    ///
    /// - Those of [`validate`](Self::validate).
    /// - [`PlacementError::FirstAlone`]: the only rank's share is smaller than `total`.
    pub fn lengths(&self, total: usize, world_size: usize) -> Result<Lengths, PlacementError> {
        self.validate(world_size)?;
        match self {
            Shares::Equal => Ok(Lengths(equal(total, world_size).collect())),
            Shares::Weighted(weights) => Ok(weighted(total, weights)),
            &Shares::First(first) if world_size == 1 && first < total => {
                Err(PlacementError::FirstAlone { first, total })
            }
            &Shares::First(first) => {
                let first = first.min(total);
                Ok(Lengths(std::iter::once(first).chain(equal(total - first, world_size - 1)).collect()))
            }
        }
    }
}

fn equal(total: usize, world_size: usize) -> impl Iterator<Item = usize> {
    (0..world_size).map(move |rank| total / world_size + usize::from(rank < total % world_size))
}

/// Source: the largest remainder method (Hamilton, 1792).
fn weighted(total: usize, weights: &[u32]) -> Lengths {
    let sum: u128 = weights.iter().map(|&weight| u128::from(weight)).sum();
    let quotas = weights.iter().map(|&weight| total as u128 * u128::from(weight));
    // A quota's whole part is at most `total`, so it is a usize again.
    let mut lengths: Vec<usize> = quotas.clone().map(|quota| (quota / sum) as usize).collect();
    let left_over = total - lengths.iter().sum::<usize>();

    let remainders: Vec<u128> = quotas.map(|quota| quota % sum).collect();
    let mut ranks: Vec<usize> = (0..weights.len()).collect();
    ranks.sort_by_key(|&rank| std::cmp::Reverse(remainders[rank])); // stable: ties stay in rank order
    for rank in ranks.into_iter().take(left_over) {
        lengths[rank] += 1;
    }
    Lengths::new(lengths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lengths(shares: &Shares, total: usize, world_size: usize) -> Vec<usize> {
        shares.lengths(total, world_size).expect("valid shares").iter().collect()
    }

    #[test]
    fn a_chunked_split_does_not_leave_the_last_rank_empty() {
        for (total, world_size, expected) in [
            (9, 4, vec![3, 2, 2, 2]),
            (36, 7, vec![6, 5, 5, 5, 5, 5, 5]),
            (10, 4, vec![3, 3, 2, 2]),
            (3, 4, vec![1, 1, 1, 0]),
            (0, 3, vec![0, 0, 0]),
            (5, 1, vec![5]),
        ] {
            assert_eq!(lengths(&Shares::Equal, total, world_size), expected);
        }
    }

    #[test]
    fn a_given_first_share_does_not_fall_back_to_equal_chunks() {
        for (total, world_size, first, expected) in [
            (32, 4, 5, vec![5, 9, 9, 9]),
            (30, 4, 4, vec![4, 9, 9, 8]),
            (10, 4, 0, vec![0, 4, 3, 3]),
            (7, 4, 4, vec![4, 1, 1, 1]),
            (7, 4, 9, vec![7, 0, 0, 0]),
            (7, 1, 7, vec![7]),
            (7, 1, 9, vec![7]),
        ] {
            assert_eq!(lengths(&Shares::First(first), total, world_size), expected);
        }
    }

    #[test]
    fn weighted_shares_go_by_the_largest_remainder_and_ties_to_the_lower_rank() {
        for (total, weights, expected) in [
            (9, vec![1, 1, 1, 1], vec![3, 2, 2, 2]),
            (10, vec![3, 1], vec![8, 2]),
            (10, vec![1, 3], vec![3, 7]),
            (7, vec![0, 2, 1], vec![0, 5, 2]),
            (1, vec![1, 2, 2], vec![0, 1, 0]),
            (usize::MAX, vec![u32::MAX, 0], vec![usize::MAX, 0]),
        ] {
            assert_eq!(lengths(&Shares::Weighted(weights.clone()), total, weights.len()), expected);
        }
    }

    #[test]
    fn impossible_shares_are_an_error_that_names_the_argument() {
        let weighted = |weights: &[u32]| Shares::Weighted(weights.to_vec());
        for (shares, world_size, expected) in [
            (Shares::Equal, 0, PlacementError::NoRanks),
            (Shares::First(1), 0, PlacementError::NoRanks),
            (weighted(&[]), 0, PlacementError::NoRanks),
            (weighted(&[1, 2]), 3, PlacementError::WeightCount { num_weights: 2, world_size: 3 }),
            (weighted(&[0, 0]), 2, PlacementError::ZeroWeights { world_size: 2 }),
        ] {
            assert_eq!(shares.validate(world_size), Err(expected.clone()));
            assert_eq!(shares.lengths(5, world_size), Err(expected));
        }
        assert_eq!(Shares::First(2).validate(1), Ok(()));
        assert_eq!(Shares::First(2).lengths(5, 1), Err(PlacementError::FirstAlone { first: 2, total: 5 }));
    }

    #[test]
    fn ranges_follow_each_other_and_empty_ranks_have_an_offset() {
        let lengths = Lengths::new([3, 0, 2]);
        assert_eq!((lengths.world_size(), lengths.total(), lengths.of(2)), (3, 5, 2));
        assert_eq!([0, 1, 2].map(|rank| lengths.range(rank)), [0..3, 3..3, 3..5]);
        assert_eq!([0, 1, 2, 3].map(|rank| lengths.offset(rank)), [0, 3, 3, 5]);
        assert_eq!(lengths.to_string(), "[3, 0, 2]");
    }

    #[test]
    fn lengths_scale_only_if_each_stays_whole() {
        let lengths = Lengths::new([6, 0, 3]);
        assert_eq!(lengths.scaled(4, 1), Some(Lengths::new([24, 0, 12])));
        assert_eq!(lengths.scaled(2, 3), Some(Lengths::new([4, 0, 2])));
        assert_eq!(lengths.scaled(7, 7), Some(lengths.clone()));
        assert_eq!(lengths.scaled(1, 2), None);
        assert_eq!(lengths.scaled(1, 0), None);
        assert_eq!(lengths.scaled(usize::MAX, 1), None);
    }

    fn any_shares() -> impl Strategy<Value = (Shares, usize)> {
        let weights = proptest::collection::vec(0_u32..50, 1..9)
            .prop_filter("all zero", |weights| weights.iter().any(|&w| w > 0));
        prop_oneof![
            (1_usize..9).prop_map(|world_size| (Shares::Equal, world_size)),
            weights.prop_map(|weights| {
                let world_size = weights.len();
                (Shares::Weighted(weights), world_size)
            }),
            (0_usize..100, 2_usize..9).prop_map(|(first, world_size)| (Shares::First(first), world_size)),
        ]
    }

    proptest! {
        #[test]
        fn every_row_is_shared_out_once_and_always_alike((shares, world_size) in any_shares(), total in 0_usize..500) {
            let lengths = shares.lengths(total, world_size).unwrap();
            prop_assert_eq!(lengths.world_size(), world_size);
            prop_assert_eq!(lengths.total(), total);
            prop_assert_eq!(&lengths, &shares.lengths(total, world_size).unwrap());
            let rows: Vec<usize> = (0..world_size).flat_map(|rank| lengths.range(rank)).collect();
            prop_assert_eq!(rows, (0..total).collect::<Vec<_>>());
        }

        #[test]
        fn equal_shares_differ_by_one_row_at_most_and_lower_ranks_get_it(total in 0_usize..500, world_size in 1_usize..9) {
            let shared = lengths(&Shares::Equal, total, world_size);
            prop_assert!(shared.is_sorted_by(|a, b| a >= b));
            prop_assert!(shared[0] - shared[world_size - 1] <= 1);
            let ones = Shares::Weighted(vec![1; world_size]);
            prop_assert_eq!(shared, lengths(&ones, total, world_size));
        }

        /// For weighted shares this is false of any method that stays within one row of the quota (Balinski, Young).
        #[test]
        fn one_more_row_takes_no_row_from_any_rank(total in 0_usize..500, first in 0_usize..100, world_size in 2_usize..9) {
            for shares in [Shares::Equal, Shares::First(first)] {
                let (before, after) = (lengths(&shares, total, world_size), lengths(&shares, total + 1, world_size));
                prop_assert!(before.iter().zip(&after).all(|(before, after)| before <= after));
            }
        }

        #[test]
        fn a_heavier_rank_never_gets_less_and_no_rank_is_a_row_off_its_quota(
            weights in proptest::collection::vec(0_u32..50, 1..9).prop_filter("all zero", |weights| weights.iter().any(|&w| w > 0)),
            total in 0_usize..500,
        ) {
            let lengths = lengths(&Shares::Weighted(weights.clone()), total, weights.len());
            let sum: usize = weights.iter().map(|&weight| weight as usize).sum();
            for (a, &weight) in weights.iter().enumerate() {
                prop_assert!((lengths[a] * sum).abs_diff(total * weight as usize) < sum);
                for (b, &other) in weights.iter().enumerate() {
                    prop_assert!(weight <= other || lengths[a] >= lengths[b]);
                }
            }
        }
    }
}
