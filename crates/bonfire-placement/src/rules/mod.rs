mod aligned;
mod batched;
mod joins;
mod matmul;
mod reduce;
mod rows;
mod views;

pub use views::reshape_stored;

use std::ops::Range;

use crate::{Lengths, PartialOp, Placement, PlacementError, Shares};

/// One input of an op, as the rules see it.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Where its parts sit.
    pub placement: &'a Placement,
    /// Its whole shape.
    pub shape: &'a [usize],
}

/// What a rule answers: the placements that the inputs must have, and those that the outputs will have.
///
/// Never `Local` or `Fill`; a `Shard` is of a dim longer than 1, and a `Partial` input is one that was `Partial` before.
///
/// A rank with no rows of a `Shard` output, or, where no output is a `Shard`, of a `Shard` input, runs nothing: it gives
/// empty parts, and what changes no sum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// One per operand, in order.
    pub inputs: Vec<Placement>,
    /// One per output, in order.
    pub outputs: Vec<Placement>,
}

/// How a reduction combines the values along a dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their mean. Where the output is `Partial`, each rank gives its sum divided by the whole length.
    Mean,
    /// Their maximum.
    Max,
    /// Their minimum.
    Min,
    /// Anything that must see the whole dim: argmax, prod, any...
    Whole,
}

/// An input of an [`Op::Batched`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Each rank needs its rows only.
    Split,
    /// Each rank needs all of it: a weight.
    Whole,
}

/// An output of an [`Op::Batched`], when the ranks share its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Yield {
    /// Each rank gives its rows.
    Split,
    /// Each rank gives its part of a sum: the gradient of a weight.
    Sum,
    /// It can be computed from whole inputs only.
    Whole,
}

/// The rows of a dim that an [`Op::Narrow`] keeps, or an [`Op::Assign`] replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// From the first one on.
    pub rows: Range<usize>,
    /// Of these every `step`-th; at least 1.
    pub step: usize,
}

impl Cut {
    /// How many rows these are.
    pub fn num_rows(&self) -> usize {
        self.rows.len().div_ceil(self.step)
    }

    /// Those that lie in `held`, counted from its start.
    pub fn within(&self, held: &Range<usize>) -> Cut {
        let num_before = held.start.saturating_sub(self.rows.start).div_ceil(self.step);
        let start = self.rows.start + num_before * self.step;
        let end = self.rows.end.min(held.end);
        let rows = if start < end { start - held.start..end - held.start } else { 0..0 };
        Cut { rows, step: self.step }
    }
}

/// An op family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Elementwise, and every op whose output dims line up one to one with the inputs' dims, counted from the left.
    ///
    /// Operands of length 1 broadcast, and so do missing trailing dims; the op may append dims (unfold). The lengths of the
    /// outputs differ from the inputs' on blocked dims only. Where the ranks share a blocked dim, they exchange rows for
    /// those of another.
    Aligned {
        /// Dims that every rank must hold whole: of a softmax or a sort, flipped ones...
        blocked: Vec<usize>,
        /// How many outputs there are.
        num_outputs: usize,
    },
    /// The same elements in row-major order under another shape.
    Reshape {
        /// The output's whole shape.
        to: Vec<usize>,
    },
    /// The same elements with the dims in another order.
    Permute {
        /// Output dim `i` is input dim `axes[i]`.
        axes: Vec<usize>,
    },
    /// Dims of length 1 repeat, and new ones come on the left.
    Expand {
        /// The output's whole shape, aligned with the input's on the right.
        to: Vec<usize>,
    },
    /// A reduction along one dim, which stays with length 1.
    Reduce {
        /// The dim that is reduced.
        dim: usize,
        /// How.
        reduction: Reduction,
    },
    /// A reduction of all elements to shape `[1]`.
    ReduceAll {
        /// How.
        reduction: Reduction,
    },
    /// `[.., m, k] x [.., k, n] -> [.., m, n]`: both of the same rank, at least 2; leading dims of length 1 broadcast.
    Matmul,
    /// Operands of the same shape but for `dim`, one after the other along it.
    Cat {
        /// The dim along which they are joined.
        dim: usize,
    },
    /// Some rows of each dim, in their order.
    Narrow {
        /// The rows that stay, one cut per dim; `None` for all rows.
        cuts: Vec<Option<Cut>>,
        /// Dims that every rank must hold whole: those that are cut in another way.
        blocked: Vec<usize>,
    },
    /// The first operand with the second one in place of what an [`Op::Narrow`] would cut out.
    Assign {
        /// The rows that are replaced, one cut per dim; `None` for all rows.
        cuts: Vec<Option<Cut>>,
        /// Dims that every rank must hold whole: those that are cut in another way.
        blocked: Vec<usize>,
    },
    /// Ranks may share any one of `dims`, the same in every [`Role::Split`] operand.
    ///
    /// A `Split` operand of length 1 on the shared dim broadcasts: each rank takes it whole. `Split` outputs have the
    /// shared dim and its length. Conv shares dim 0 and has a `Whole` weight; linear shares any dim but the last; so do
    /// pooling, embedding, layer norm and the backward ops of all of these.
    Batched {
        /// The dims that can be shared, preferred ones first.
        dims: Vec<usize>,
        /// One per operand.
        roles: Vec<Role>,
        /// One per output.
        outputs: Vec<Yield>,
    },
    /// Ranks share rows that lie along another dim in each operand and output: items in dim 1 of one and in dim 0 of
    /// another, or indices and what they pick. All operands with rows have as many.
    Rows {
        /// One per operand; `None` for one that every rank needs whole.
        inputs: Vec<Option<usize>>,
        /// One per output; `None` for one to which each row adds.
        outputs: Vec<Option<usize>>,
    },
    /// No rule: every rank gets all inputs and runs the op whole.
    Whole {
        /// How many outputs there are.
        num_outputs: usize,
    },
}

impl Op {
    /// The placements that spread this op over the ranks.
    ///
    /// To be asked once the op is to be spread. `Local` and `Fill` operands take any placement, `Replicate` is sliced
    /// for free, `Shard` stays where the op allows it and else becomes one of another dim, and `Partial` stays where the
    /// op is linear in it, else it is reduced. `shares` decides only where no operand is sharded on a dim that the op can
    /// share.
    ///
    /// # Errors
    ///
    /// - [`PlacementError::OperandCount`]: the op takes another number of operands.
    /// - [`PlacementError::Misplaced`]: a `Shard` does not fit its shape or `world_size`.
    /// - [`PlacementError::Shape`]: the shapes do not fit each other or the op.
    /// - Those of [`Shares::lengths`], where `shares` decides.
    pub fn plan(&self, operands: &[Operand<'_>], shares: &Shares, world_size: usize) -> Result<Plan, PlacementError> {
        self.check(operands, world_size)?;
        let fitting = |plan: Option<Plan>| plan.ok_or_else(|| self.shape_error(operands));
        let sharing = Sharing { shares, world_size };
        match self {
            Op::Aligned { blocked, num_outputs } => aligned::plan(operands, blocked, *num_outputs, sharing),
            Op::Reshape { to } => fitting(views::reshape(operands[0], to, sharing)?),
            Op::Permute { axes } => fitting(views::permute(operands[0], axes)),
            Op::Expand { to } => fitting(views::expand(operands[0], to)),
            &Op::Reduce { dim, reduction } => fitting(reduce::along(operands[0], dim, reduction, sharing)?),
            &Op::ReduceAll { reduction } => Ok(reduce::all(operands[0], reduction)),
            Op::Matmul => match matmul::Matmul::new(operands[0], operands[1]) {
                Some(matmul) => matmul.plan(sharing),
                None => Err(self.shape_error(operands)),
            },
            Op::Batched { dims, roles, outputs } => batched::Batched { operands, dims, roles, outputs }.plan(sharing),
            Op::Cat { dim } => joins::cat(operands, *dim, sharing),
            Op::Narrow { cuts, blocked } => fitting(joins::narrow(operands[0], cuts, blocked, sharing)?),
            Op::Assign { cuts, blocked } => fitting(joins::assign([operands[0], operands[1]], cuts, blocked, sharing)?),
            Op::Rows { inputs, outputs } => fitting(rows::plan(operands, inputs, outputs, sharing)?),
            Op::Whole { num_outputs } => Ok(Plan::replicate(operands.len(), *num_outputs)),
        }
    }

    fn check(&self, operands: &[Operand<'_>], world_size: usize) -> Result<(), PlacementError> {
        let expected = match self {
            Op::Aligned { .. } | Op::Cat { .. } | Op::Whole { .. } => operands.len(),
            Op::Reshape { .. } | Op::Permute { .. } | Op::Expand { .. } | Op::Narrow { .. } => 1,
            Op::Reduce { .. } | Op::ReduceAll { .. } => 1,
            Op::Matmul | Op::Assign { .. } => 2,
            Op::Batched { roles, .. } => roles.len(),
            Op::Rows { inputs, .. } => inputs.len(),
        };
        if operands.len() != expected {
            return Err(PlacementError::OperandCount { op: Box::new(self.clone()), expected, actual: operands.len() });
        }
        match operands.iter().position(|operand| !operand.fits(world_size)) {
            Some(operand) => Err(PlacementError::Misplaced {
                op: Box::new(self.clone()),
                operand,
                placement: operands[operand].placement.clone(),
                shape: operands[operand].shape.to_vec(),
                world_size,
            }),
            None => Ok(()),
        }
    }

    fn shape_error(&self, operands: &[Operand<'_>]) -> PlacementError {
        let shapes = operands.iter().map(|operand| operand.shape.to_vec()).collect();
        PlacementError::Shape { op: Box::new(self.clone()), shapes }
    }
}

impl Plan {
    /// Every rank holds and computes everything: always right.
    fn replicate(num_inputs: usize, num_outputs: usize) -> Self {
        Plan { inputs: vec![Placement::Replicate; num_inputs], outputs: vec![Placement::Replicate; num_outputs] }
    }

    /// The one operand stays where it is and gives `output`; without one, everything is replicated.
    fn in_place(operand: Operand<'_>, output: Option<Placement>) -> Self {
        match output {
            Some(output) => Plan { inputs: vec![operand.placement.clone()], outputs: vec![output] },
            None => Plan::replicate(1, 1),
        }
    }
}

/// The first dim that has a row for every rank, or else the longest; none without two rows. Of each: what names it, and its
/// length.
fn lengthy<T: Clone>(dims: impl Iterator<Item = (T, usize)> + Clone, world_size: usize) -> Option<(T, usize)> {
    let long_enough = dims.clone().find(|&(_, length)| length > 1 && length >= world_size);
    let longest = || {
        dims.filter(|&(_, length)| length > 1).reduce(|longest, next| if next.1 > longest.1 { next } else { longest })
    };
    long_enough.or_else(longest)
}

/// How a dim is shared that no operand shares yet.
#[derive(Clone, Copy)]
struct Sharing<'a> {
    shares: &'a Shares,
    world_size: usize,
}

impl Sharing<'_> {
    fn lengths(self, total: usize) -> Result<Lengths, PlacementError> {
        self.shares.lengths(total, self.world_size)
    }
}

impl<'a> Operand<'a> {
    fn fits(&self, world_size: usize) -> bool {
        match self.placement {
            Placement::Shard { dim, lengths } => {
                lengths.world_size() == world_size && self.shape.get(*dim) == Some(&lengths.total())
            }
            Placement::Local | Placement::Fill | Placement::Replicate | Placement::Partial { .. } => true,
        }
    }

    /// The shared dim and its lengths, where it is one worth sharing: longer than 1.
    fn shard(&self) -> Option<(usize, &'a Lengths)> {
        match self.placement {
            Placement::Shard { dim, lengths } if self.shape[*dim] > 1 => Some((*dim, lengths)),
            Placement::Local
            | Placement::Fill
            | Placement::Replicate
            | Placement::Shard { .. }
            | Placement::Partial { .. } => None,
        }
    }

    /// The placement beside operands of which the ranks share `dim`: the same, or whole where this one broadcasts.
    fn beside(&self, dim: usize, lengths: &Lengths) -> Placement {
        match self.shape.get(dim) {
            Some(&length) if length > 1 => Placement::shard(dim, lengths.clone()),
            Some(_) | None => Placement::Replicate,
        }
    }

    fn num_elements(&self) -> usize {
        num_elements(self.shape)
    }
}

/// Saturating, so that it is total; no real tensor comes near.
fn num_elements(shape: &[usize]) -> usize {
    shape.iter().fold(1, |product, &length| usize::saturating_mul(product, length))
}

/// The shard that the others follow: the largest operand's (the first, if several), among those that `can_share` allows.
fn driver<'a>(
    operands: impl Iterator<Item = Operand<'a>>,
    can_share: impl Fn(usize, usize) -> bool,
) -> Option<(usize, &'a Lengths)> {
    let mut largest = None;
    for operand in operands {
        let Some((dim, lengths)) = operand.shard() else {
            continue;
        };
        let num_elements = operand.num_elements();
        if largest.is_none_or(|(most, _)| num_elements > most) && can_share(dim, operand.shape[dim]) {
            largest = Some((num_elements, (dim, lengths)));
        }
    }
    largest.map(|(_, shard)| shard)
}

impl Reduction {
    /// How the ranks' results combine into that of the whole dim, if they do.
    fn partial(self) -> Option<Placement> {
        match self {
            Reduction::Sum | Reduction::Mean => Some(Placement::Partial { op: PartialOp::Sum }),
            Reduction::Max => Some(Placement::Partial { op: PartialOp::Max }),
            Reduction::Min => Some(Placement::Partial { op: PartialOp::Min }),
            Reduction::Whole => None,
        }
    }

    fn is_linear(self) -> bool {
        match self {
            Reduction::Sum | Reduction::Mean => true,
            Reduction::Max | Reduction::Min | Reduction::Whole => false,
        }
    }
}
