use std::fmt;

use crate::Lengths;

/// How the ranks' tensors combine into the value of a [`Placement::Partial`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PartialOp {
    /// Their sum; a rank with nothing to add gives zeros.
    Sum,
    /// Their elementwise maximum; a rank with nothing to add gives the lowest value.
    Max,
    /// Their elementwise minimum; a rank with nothing to add gives the highest value.
    Min,
}

/// Where the parts of one logical tensor sit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// A plain tensor on the home device, not spread yet.
    Local,
    /// One value everywhere: no storage, takes any placement for free.
    Fill,
    /// Every rank holds the whole value.
    Replicate,
    /// Rank `r` holds `lengths.of(r)` rows of `dim`, in rank order.
    Shard {
        /// The dim that the ranks share.
        dim: usize,
        /// How many of its rows each rank holds; they may differ and may be 0.
        lengths: Lengths,
    },
    /// The value is the sum (or max, or min) of the ranks' tensors, each of the whole shape.
    Partial {
        /// How they combine.
        op: PartialOp,
    },
}

impl Placement {
    /// A [`Placement::Shard`] on `dim`.
    pub fn shard(dim: usize, lengths: impl Into<Lengths>) -> Self {
        Placement::Shard { dim, lengths: lengths.into() }
    }

    /// Whether the ranks hold the value between them.
    pub fn is_spread(&self) -> bool {
        match self {
            Placement::Local | Placement::Fill => false,
            Placement::Replicate | Placement::Shard { .. } | Placement::Partial { .. } => true,
        }
    }

    /// The shape of what `rank` holds of a tensor of whole shape `shape`.
    ///
    /// # Panics
    ///
    /// If a `Shard`'s `dim` is not a dim of `shape`, or `rank` is not one of its ranks.
    pub fn local_shape(&self, shape: &[usize], rank: usize) -> Vec<usize> {
        let mut local = shape.to_vec();
        match self {
            Placement::Shard { dim, lengths } => local[*dim] = lengths.of(rank),
            Placement::Local | Placement::Fill | Placement::Replicate | Placement::Partial { .. } => {}
        }
        local
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Local => f.write_str("local"),
            Placement::Fill => f.write_str("fill"),
            Placement::Replicate => f.write_str("replicate"),
            Placement::Shard { dim, lengths } => write!(f, "shard(dim {dim}, {lengths})"),
            Placement::Partial { op } => write!(f, "partial({op})"),
        }
    }
}

impl fmt::Display for PartialOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PartialOp::Sum => "sum",
            PartialOp::Max => "max",
            PartialOp::Min => "min",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placement_says_what_it_is_and_what_a_rank_holds() {
        for (placement, text, is_spread, local_shape) in [
            (Placement::Local, "local", false, [5, 3]),
            (Placement::Fill, "fill", false, [5, 3]),
            (Placement::Replicate, "replicate", true, [5, 3]),
            (Placement::shard(0, [3, 2]), "shard(dim 0, [3, 2])", true, [2, 3]),
            (Placement::shard(1, [3, 0]), "shard(dim 1, [3, 0])", true, [5, 0]),
            (Placement::Partial { op: PartialOp::Sum }, "partial(sum)", true, [5, 3]),
            (Placement::Partial { op: PartialOp::Max }, "partial(max)", true, [5, 3]),
            (Placement::Partial { op: PartialOp::Min }, "partial(min)", true, [5, 3]),
        ] {
            assert_eq!(placement.to_string(), text);
            assert_eq!(placement.is_spread(), is_spread);
            assert_eq!(placement.local_shape(&[5, 3], 1), local_shape);
        }
    }
}
