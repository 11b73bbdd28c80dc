use crate::{Placement, PlacementError};

/// What it takes to bring a tensor from one placement to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Redistribution {
    /// Nothing.
    Keep,
    /// The home device hands out the value, or each rank fills its own: from `Local` or `Fill` to `Replicate` or `Shard`.
    Spread,
    /// Each rank takes its rows of what it holds whole: from `Replicate` to `Shard`.
    Slice,
    /// Each rank gets the rows of all: from `Shard` to `Replicate`.
    AllGather,
    /// Each rank gets the combined value: from `Partial` to `Replicate`.
    AllReduce,
    /// Each rank gets its rows of the combined value: from `Partial` to `Shard`.
    ReduceScatter,
    /// The ranks exchange rows: from `Shard` to a `Shard` of another dim, or of other lengths.
    AllToAll,
}

/// The way from one placement to another, of a tensor whose shape both fit.
///
/// # Errors
///
/// [`PlacementError::Unreachable`]: `to` is `Local`, `Fill` or `Partial`, and `from` is not the same.
pub fn redistribute(from: &Placement, to: &Placement) -> Result<Redistribution, PlacementError> {
    use Placement::{Fill, Local, Partial, Replicate, Shard};
    if from == to {
        return Ok(Redistribution::Keep);
    }
    match (from, to) {
        (_, Local | Fill | Partial { .. }) => Err(PlacementError::Unreachable { from: from.clone(), to: to.clone() }),
        (Local | Fill, Replicate | Shard { .. }) => Ok(Redistribution::Spread),
        (Replicate, Replicate) => Ok(Redistribution::Keep),
        (Replicate, Shard { .. }) => Ok(Redistribution::Slice),
        (Shard { .. }, Replicate) => Ok(Redistribution::AllGather),
        (Shard { .. }, Shard { .. }) => Ok(Redistribution::AllToAll),
        (Partial { .. }, Replicate) => Ok(Redistribution::AllReduce),
        (Partial { .. }, Shard { .. }) => Ok(Redistribution::ReduceScatter),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PartialOp;

    #[test]
    fn every_pair_of_placements_has_its_one_redistribution_or_none() {
        use Redistribution::*;
        let placements = [
            Placement::Local,
            Placement::Fill,
            Placement::Replicate,
            Placement::shard(0, [2, 1]),
            Placement::shard(0, [1, 2]),
            Placement::shard(1, [2, 1]),
            Placement::Partial { op: PartialOp::Sum },
            Placement::Partial { op: PartialOp::Max },
        ];
        let table = [
            [Some(Keep), None, Some(Spread), Some(Spread), Some(Spread), Some(Spread), None, None],
            [None, Some(Keep), Some(Spread), Some(Spread), Some(Spread), Some(Spread), None, None],
            [None, None, Some(Keep), Some(Slice), Some(Slice), Some(Slice), None, None],
            [None, None, Some(AllGather), Some(Keep), Some(AllToAll), Some(AllToAll), None, None],
            [None, None, Some(AllGather), Some(AllToAll), Some(Keep), Some(AllToAll), None, None],
            [None, None, Some(AllGather), Some(AllToAll), Some(AllToAll), Some(Keep), None, None],
            [
                None,
                None,
                Some(AllReduce),
                Some(ReduceScatter),
                Some(ReduceScatter),
                Some(ReduceScatter),
                Some(Keep),
                None,
            ],
            [
                None,
                None,
                Some(AllReduce),
                Some(ReduceScatter),
                Some(ReduceScatter),
                Some(ReduceScatter),
                None,
                Some(Keep),
            ],
        ];
        for (from, row) in placements.iter().zip(table) {
            for (to, expected) in placements.iter().zip(row) {
                let error = PlacementError::Unreachable { from: from.clone(), to: to.clone() };
                assert_eq!(redistribute(from, to), expected.ok_or(error));
            }
        }
    }
}
