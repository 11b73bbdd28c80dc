use super::{Operand, Plan, Sharing, driver, lengthy, num_elements};
use crate::{Lengths, Placement, PlacementError};

/// Each rank computes its rows of one unblocked dim that lines up in all operands: of the one that is shared already, or
/// else, where only blocked dims are shared, of another.
pub(super) fn plan(
    operands: &[Operand<'_>],
    blocked: &[usize],
    num_outputs: usize,
    sharing: Sharing<'_>,
) -> Result<Plan, PlacementError> {
    match follow(operands, blocked, num_outputs) {
        Some(plan) => Ok(plan),
        None => step_aside(operands, blocked, num_outputs, sharing),
    }
}

/// The largest shard stays where it is: the activation rather than what is broadcast onto it.
pub(super) fn follow(operands: &[Operand<'_>], blocked: &[usize], num_outputs: usize) -> Option<Plan> {
    let can_share = |dim, length| !blocked.contains(&dim) && line_up(operands, dim, length);
    let (dim, lengths) = driver(operands.iter().copied(), can_share)?;
    Some(share(operands, dim, lengths, num_outputs))
}

/// The ranks exchange rows for those of a dim that may be shared: each then holds and computes its part, instead of
/// everything. Where no such dim is left, or nothing was shared before, everything is replicated.
pub(super) fn step_aside(
    operands: &[Operand<'_>],
    blocked: &[usize],
    num_outputs: usize,
    sharing: Sharing<'_>,
) -> Result<Plan, PlacementError> {
    // Of several largest the first, which `max_by_key` finds last.
    let sharded = operands.iter().rev().filter(|operand| operand.shard().is_some());
    let dim = sharded.max_by_key(|operand| num_elements(operand.shape)).and_then(|largest| {
        let dims = largest.shape.iter().copied().enumerate();
        let can_share = |&(dim, length): &(usize, usize)| !blocked.contains(&dim) && line_up(operands, dim, length);
        lengthy(dims.filter(can_share), sharing.world_size)
    });
    match dim {
        Some((dim, length)) => Ok(share(operands, dim, &sharing.lengths(length)?, num_outputs)),
        None => Ok(Plan::replicate(operands.len(), num_outputs)),
    }
}

fn line_up(operands: &[Operand<'_>], dim: usize, length: usize) -> bool {
    operands.iter().all(|operand| match operand.shape.get(dim) {
        Some(&other) => other == length || other == 1,
        None => true,
    })
}

fn share(operands: &[Operand<'_>], dim: usize, lengths: &Lengths, num_outputs: usize) -> Plan {
    Plan {
        inputs: operands.iter().map(|operand| operand.beside(dim, lengths)).collect(),
        outputs: vec![Placement::shard(dim, lengths.clone()); num_outputs],
    }
}
