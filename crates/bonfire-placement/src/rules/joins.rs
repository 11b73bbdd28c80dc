//! Tensors joined along a dim, and ranges cut out of one: also where the ranks share that dim.

use std::ops::Range;

use super::{Operand, Plan, Sharing, aligned};
use crate::{Lengths, Placement, PlacementError};

/// Where the ranks share another dim than `dim`, they join their rows of it. Where they share `dim`, they exchange rows:
/// each gets those of every operand that its part of the whole is made of.
pub(super) fn cat(operands: &[Operand<'_>], dim: usize, sharing: Sharing<'_>) -> Result<Plan, PlacementError> {
    let beside = aligned::plan(operands, &[dim], 1);
    let is_shared = operands.iter().any(|operand| operand.shard().is_some_and(|(shared, _)| shared == dim));
    // A single row is nobody's part: it would have to be held by one rank alone.
    let are_long = || operands.iter().all(|operand| operand.shape.get(dim).is_some_and(|&length| length > 1));
    if beside.outputs[0] != Placement::Replicate || !is_shared || !are_long() {
        return Ok(beside);
    }
    let lengths = sharing.lengths(operands.iter().map(|operand| operand.shape[dim]).sum())?;
    let mut start = 0;
    let inputs = operands.iter().map(|operand| {
        let rows = start..start + operand.shape[dim];
        start = rows.end;
        Placement::shard(dim, clipped(&lengths, &rows))
    });
    Ok(Plan { inputs: inputs.collect(), outputs: vec![Placement::shard(dim, lengths.clone())] })
}

/// `ranges` has the rows that are cut out of each dim, or `None` where all stay. `None` if there are more dims than ranges.
pub(super) fn narrow(operand: Operand<'_>, ranges: &[Option<Range<usize>>], blocked: &[usize]) -> Option<Plan> {
    if ranges.len() != operand.shape.len() {
        return None;
    }
    let output = match operand.shard() {
        Some((dim, _)) if blocked.contains(&dim) => None,
        Some((dim, lengths)) => match &ranges[dim] {
            None => Some(operand.placement.clone()),
            Some(range) if range.len() > 1 => Some(Placement::shard(dim, clipped(lengths, range))),
            // A single row is on one rank alone.
            Some(_) => None,
        },
        None => None,
    };
    Some(Plan::in_place(operand, output))
}

/// How many of the rows in `range` each rank holds.
fn clipped(lengths: &Lengths, range: &Range<usize>) -> Lengths {
    let overlap = |held: Range<usize>| held.end.min(range.end).saturating_sub(held.start.max(range.start));
    Lengths::new((0..lengths.world_size()).map(|rank| overlap(lengths.range(rank))).collect::<Vec<_>>())
}
