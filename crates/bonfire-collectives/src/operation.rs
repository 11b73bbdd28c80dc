//! What ranks can ask of each other: the collectives and the ways to reduce.

use core::fmt;

use crate::DType;

/// How the values of all ranks become one.
///
/// Every result is formed in rank order, so it is the same bits on every rank and in every run.
/// [`F16`](DType::F16) and [`BF16`](DType::BF16) accumulate in f32 and are rounded once, at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum; integers wrap around on overflow.
    Sum,
    /// The sum divided by the number of ranks, division last; floats only.
    Mean,
    /// The largest value; a NaN on any rank makes the result NaN, and of two equal values (0 and -0)
    /// the lower rank's is kept.
    Max,
    /// The smallest value; NaN and equal values as in [`Max`](Self::Max).
    Min,
}

impl ReduceOp {
    /// Every reduction, for tables and tests.
    pub const ALL: [Self; 4] = [Self::Sum, Self::Mean, Self::Max, Self::Min];

    /// Whether values of `dtype` can be reduced this way: not [`Bool`](DType::Bool), and no mean of integers.
    #[must_use]
    pub const fn supports(self, dtype: DType) -> bool {
        match self {
            Self::Sum | Self::Max | Self::Min => !matches!(dtype, DType::Bool),
            Self::Mean => dtype.is_float(),
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Max => "max",
            Self::Min => "min",
        })
    }
}

/// An operation between ranks, as named in errors and counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Collective {
    /// Every rank ends with the reduction of all ranks' buffers.
    AllReduce,
    /// Every rank ends with its own segment of the reduction.
    ReduceScatter,
    /// Every rank ends with all ranks' buffers, one after the other.
    AllGather,
    /// Every rank ends with the root's buffer.
    Broadcast,
    /// Nobody goes on before everybody has come.
    Barrier,
    /// One rank hands a buffer to another.
    Send,
    /// One rank takes a buffer from another.
    Recv,
    /// Every rank ends with a pointer to every rank's value; ranks of one process only.
    Exchange,
}

impl Collective {
    /// Every operation, in the order of [`Tally`](crate::Tally).
    pub const ALL: [Self; 8] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Barrier,
        Self::Send,
        Self::Recv,
        Self::Exchange,
    ];

    /// Whether two ranks take part rather than all.
    #[must_use]
    pub const fn is_point_to_point(self) -> bool {
        match self {
            Self::Send | Self::Recv => true,
            Self::AllReduce
            | Self::ReduceScatter
            | Self::AllGather
            | Self::Broadcast
            | Self::Barrier
            | Self::Exchange => false,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Exchange => "exchange",
        })
    }
}
