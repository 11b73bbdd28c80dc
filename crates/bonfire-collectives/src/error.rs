//! What can go wrong between ranks.

use std::{sync::Arc, time::Duration};

use crate::{Collective, DType, ReduceOp};

/// Why a collective did not happen.
///
/// Every error of a call breaks the group for good: a rank that stops alone would leave the others waiting.
/// The ranks concerned get the cause itself; every other and every later call gets
/// [`Broken`](Self::Broken) around it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// Ranks did not come to a collective in time.
    #[error(
        "rank {rank} of {world_size}: {collective} waited {waited:?}; ranks {missing:?} did not arrive; \
         look there for the cause, or raise the group's timeout"
    )]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// What it waited in.
        collective: Collective,
        /// How long it waited.
        waited: Duration,
        /// The ranks that did not arrive.
        missing: Vec<usize>,
    },

    /// Ranks came with different operations, dtypes, lengths, list sizes or roots.
    #[error(
        "rank {rank} of {world_size}: {collective} does not match: rank {differing} gave {given}, \
         rank {reference} gave {expected}; all ranks must issue the same collectives in the same order"
    )]
    Mismatch {
        /// The rank that reports.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// What that rank called.
        collective: Collective,
        /// The lowest rank that differs from most.
        differing: usize,
        /// The lowest rank of those that agree.
        reference: usize,
        /// What the differing rank gave.
        given: String,
        /// What the reference rank gave.
        expected: String,
    },

    /// A rank gave up its communicator while others could still need it.
    #[error(
        "rank {rank} of {world_size} {} after {num_calls} calls",
        if *.panicked { "panicked" } else { "ended" }
    )]
    RankEnded {
        /// The rank that ended.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// Calls that rank had made.
        num_calls: u64,
        /// Whether its thread was unwinding from a panic.
        panicked: bool,
    },

    /// The connection to a rank failed, though nobody says that it has ended.
    #[error("rank {rank} of {world_size} lost its connection to rank {other}: {reason}")]
    ConnectionFailed {
        /// The rank that noticed.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// The other end.
        other: usize,
        /// What the system says.
        reason: String,
    },

    /// A rank broke the group on purpose.
    #[error("rank {rank} of {world_size} aborted the group: {reason}")]
    Aborted {
        /// The rank that called [`abort`](crate::Communicator::abort).
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// What it said.
        reason: String,
    },

    /// The group was broken by an earlier error.
    #[error(
        "rank {rank} of {world_size}: {collective} refused, the group is broken for good, start a new one; \
         first cause: {cause}"
    )]
    Broken {
        /// The rank whose call was refused.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// The call that was refused.
        collective: Collective,
        /// What broke the group.
        #[source]
        cause: Arc<CollectiveError>,
    },

    /// A dtype cannot be reduced this way.
    #[error(
        "rank {rank} of {world_size}: {collective} cannot take the {op} of {dtype} values; {}",
        if *.dtype == DType::Bool { "cast them to u8 first" } else { "cast to a float first, or use sum" }
    )]
    UnsupportedReduction {
        /// The rank that asked.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// The call.
        collective: Collective,
        /// The reduction it asked for.
        op: ReduceOp,
        /// The dtype that does not allow it.
        dtype: DType,
    },

    /// An argument has another length than the other arguments demand.
    #[error("rank {rank} of {world_size}: {collective} got {actual} for {argument}, must be {expected}")]
    WrongLength {
        /// The rank that called.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// The call.
        collective: Collective,
        /// Which argument, in which unit.
        argument: &'static str,
        /// Its length.
        actual: usize,
        /// The length it must have.
        expected: usize,
    },

    /// Input and output of one call have different dtypes.
    #[error("rank {rank} of {world_size}: {collective} got a {input} input and a {output} output; make them equal")]
    WrongDType {
        /// The rank that called.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// The call.
        collective: Collective,
        /// The input's dtype.
        input: DType,
        /// The output's dtype.
        output: DType,
    },

    /// An argument names a rank that cannot take part.
    #[error(
        "rank {rank} of {world_size}: {collective} got {argument} = {value}, must be a rank below {world_size}{}",
        if .value == .rank { " other than its own" } else { "" }
    )]
    WrongRank {
        /// The rank that called.
        rank: usize,
        /// The number of ranks in the group.
        world_size: usize,
        /// The call.
        collective: Collective,
        /// The argument's name.
        argument: &'static str,
        /// Its value.
        value: usize,
    },

    /// Bytes that are not a whole number of elements.
    #[error("{num_bytes} bytes are not a whole number of {dtype} elements of {} bytes", .dtype.size_bytes())]
    PartialElement {
        /// The dtype asked for.
        dtype: DType,
        /// The length of the bytes.
        num_bytes: usize,
    },
}
