use crate::{Op, Placement};

/// Why a dim cannot be shared out, a tensor cannot be moved, or an op cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// There is no rank to hold anything.
    #[error("world_size is 0; give at least one rank")]
    NoRanks,
    /// [`Shares::Weighted`](crate::Shares::Weighted) does not have one weight per rank.
    #[error("{num_weights} weights for {world_size} ranks; give one weight per rank")]
    WeightCount {
        /// How many weights were given.
        num_weights: usize,
        /// How many ranks there are.
        world_size: usize,
    },
    /// [`Shares::Weighted`](crate::Shares::Weighted) gives no rank anything.
    #[error("the weights of all {world_size} ranks are 0; give at least one a positive weight")]
    ZeroWeights {
        /// How many ranks there are.
        world_size: usize,
    },
    /// [`Shares::First`](crate::Shares::First) leaves rows for other ranks, and there are none.
    #[error("rank 0 is to hold {first} of {total} rows and is alone, so no rank holds the rest; use equal shares")]
    FirstAlone {
        /// How many rows rank 0 was to hold.
        first: usize,
        /// How many rows there are.
        total: usize,
    },
    /// The weights of one change of a [`ShareSchedule`](crate::ShareSchedule) do not fit the ranks.
    #[error("the shares from step {step} on: {reason}")]
    Change {
        /// The change's step.
        step: u64,
        /// What is wrong with its weights.
        reason: Box<PlacementError>,
    },
    /// The steps of a [`ShareSchedule`](crate::ShareSchedule) do not rise.
    #[error("shares change at step {step}, listed after step {previous}; list changes by rising steps, one for each")]
    ChangeOrder {
        /// The step of the change before.
        previous: u64,
        /// The step that should be larger.
        step: u64,
    },
    /// Nothing goes to `Local`, `Fill` or `Partial`: a value that has been spread stays spread.
    #[error("{from} cannot become {to}; a tensor is moved to replicate or shard only")]
    Unreachable {
        /// The placement that the tensor has.
        from: Placement,
        /// The placement that was asked for.
        to: Placement,
    },
    /// An operand's `Shard` does not fit its shape or the number of ranks.
    #[error("{op:?}: operand {operand} is {placement}, which does not fit shape {shape:?} on {world_size} ranks")]
    Misplaced {
        /// The op.
        op: Box<Op>,
        /// The index of the operand.
        operand: usize,
        /// Its placement.
        placement: Placement,
        /// Its whole shape.
        shape: Vec<usize>,
        /// How many ranks there are.
        world_size: usize,
    },
    /// An op was given too few or too many operands.
    #[error("{op:?} takes {expected} operands, got {actual}")]
    OperandCount {
        /// The op.
        op: Box<Op>,
        /// How many it takes.
        expected: usize,
        /// How many it was given.
        actual: usize,
    },
    /// The operands' shapes do not fit each other or the op's own arguments.
    #[error("{op:?} does not fit operands of shapes {shapes:?}")]
    Shape {
        /// The op.
        op: Box<Op>,
        /// The operands' whole shapes.
        shapes: Vec<Vec<usize>>,
    },
}
