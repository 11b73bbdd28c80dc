//! Tensors joined along a dim, and rows cut out of one or replaced in it: also where the ranks share that dim.

use super::{Cut, Operand, Plan, Sharing, aligned};
use crate::{Lengths, Placement, PlacementError};

/// Where the ranks share another dim than `dim`, they join their rows of it. Where they share `dim`, they exchange rows:
/// each gets those of every operand that its part of the whole is made of.
pub(super) fn cat(operands: &[Operand<'_>], dim: usize, sharing: Sharing<'_>) -> Result<Plan, PlacementError> {
    if let Some(beside) = aligned::follow(operands, &[dim], 1) {
        return Ok(beside);
    }
    let is_shared = operands.iter().any(|operand| operand.shard().is_some_and(|(shared, _)| shared == dim));
    // A single row is nobody's part: it would have to be held by one rank alone.
    let are_long = || operands.iter().all(|operand| operand.shape.get(dim).is_some_and(|&length| length > 1));
    if !is_shared || !are_long() {
        return aligned::step_aside(operands, &[dim], 1, sharing);
    }
    let lengths = sharing.lengths(operands.iter().map(|operand| operand.shape[dim]).sum())?;
    let mut start = 0;
    let inputs = operands.iter().map(|operand| {
        let rows = start..start + operand.shape[dim];
        start = rows.end;
        Placement::shard(dim, clipped(&lengths, &Cut { rows, step: 1 }))
    });
    Ok(Plan { inputs: inputs.collect(), outputs: vec![Placement::shard(dim, lengths.clone())] })
}

/// Each rank cuts what it holds. A single row of the shared dim is on one rank alone, and so the ranks share another dim.
///
/// `cuts` has the rows that are cut out of each dim, or `None` where all stay. `None` if there are more dims than cuts.
pub(super) fn narrow(
    operand: Operand<'_>,
    cuts: &[Option<Cut>],
    blocked: &[usize],
    sharing: Sharing<'_>,
) -> Result<Option<Plan>, PlacementError> {
    if cuts.len() != operand.shape.len() {
        return Ok(None);
    }
    let output = match operand.shard() {
        Some((dim, _)) if blocked.contains(&dim) => None,
        Some((dim, lengths)) => match &cuts[dim] {
            None => Some(operand.placement.clone()),
            Some(cut) if cut.num_rows() > 1 => Some(Placement::shard(dim, clipped(lengths, cut))),
            Some(_) => None,
        },
        None => None,
    };
    match output {
        Some(output) => Ok(Some(Plan { inputs: vec![operand.placement.clone()], outputs: vec![output] })),
        None => aligned::step_aside(&[operand], &uncuttable(cuts, blocked), 1, sharing).map(Some),
    }
}

/// Each rank replaces rows of what it holds of `target`, by those of `value` that go there; a single row is known to all.
///
/// Where only `value` is shared along a dim that is cut, `target` is shared by shares. `None` if there are more dims than
/// cuts.
pub(super) fn assign(
    [target, value]: [Operand<'_>; 2],
    cuts: &[Option<Cut>],
    blocked: &[usize],
    sharing: Sharing<'_>,
) -> Result<Option<Plan>, PlacementError> {
    if cuts.len() != target.shape.len() || value.shape.len() != target.shape.len() {
        return Ok(None);
    }
    let usable = |operand: Operand<'_>| {
        let (dim, lengths) = operand.shard()?;
        (!blocked.contains(&dim) && target.shape[dim] > 1).then(|| (dim, lengths.clone()))
    };
    let (dim, lengths) = match (usable(target), usable(value)) {
        (Some(shared), _) => shared,
        (None, Some((dim, _))) if cuts[dim].is_some() => (dim, sharing.lengths(target.shape[dim])?),
        (None, Some(shared)) => shared,
        (None, None) => {
            let blocked = uncuttable(cuts, blocked);
            return aligned::step_aside(&[target, value], &blocked, 1, sharing).map(Some);
        }
    };
    let rows = match &cuts[dim] {
        None => lengths.clone(),
        Some(cut) => clipped(&lengths, cut),
    };
    let target = Placement::shard(dim, lengths);
    Ok(Some(Plan { inputs: vec![target.clone(), value.beside(dim, &rows)], outputs: vec![target] }))
}

/// The dims of which a rank cannot cut its part as it would cut the whole.
fn uncuttable(cuts: &[Option<Cut>], blocked: &[usize]) -> Vec<usize> {
    (0..cuts.len()).filter(|dim| cuts[*dim].is_some() || blocked.contains(dim)).collect()
}

/// How many of the rows of `cut` each rank holds.
fn clipped(lengths: &Lengths, cut: &Cut) -> Lengths {
    Lengths::new((0..lengths.world_size()).map(|rank| cut.within(&lengths.range(rank)).num_rows()).collect::<Vec<_>>())
}
