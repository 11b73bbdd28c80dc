//! Ops that move no value between elements: a `Partial` passes through, a `Shard` goes where its dim goes.

use super::{Operand, Plan, num_elements};
use crate::{Lengths, Placement};

/// `None` if `to` has another number of elements.
pub(super) fn reshape(operand: Operand<'_>, to: &[usize]) -> Option<Plan> {
    (num_elements(operand.shape) == num_elements(to)).then(|| {
        plan(operand, |dim, lengths| {
            let from = operand.shape;
            let output = rows_of(from, dim, to)?;
            Some(Placement::shard(output, lengths.scaled(to[output], from[dim])?))
        })
    })
}

/// `None` if `axes` is not an order of the dims.
pub(super) fn permute(operand: Operand<'_>, axes: &[usize]) -> Option<Plan> {
    let goes_to = |dim: usize| axes.iter().position(|&axis| axis == dim);
    let rank = operand.shape.len();
    (axes.len() == rank && (0..rank).all(|dim| goes_to(dim).is_some()))
        .then(|| plan(operand, |dim, lengths| Some(Placement::shard(goes_to(dim)?, lengths.clone()))))
}

/// `None` if a dim longer than 1 would change its length.
pub(super) fn expand(operand: Operand<'_>, to: &[usize]) -> Option<Plan> {
    let new_dims = to.len().checked_sub(operand.shape.len())?;
    let mut lengths = operand.shape.iter().zip(&to[new_dims..]);
    lengths
        .all(|(&from, &to)| from == to || from == 1)
        .then(|| plan(operand, |dim, lengths| Some(Placement::shard(new_dims + dim, lengths.clone()))))
}

fn plan(operand: Operand<'_>, follow: impl FnOnce(usize, &Lengths) -> Option<Placement>) -> Plan {
    let output = match operand.placement {
        Placement::Partial { .. } => Some(operand.placement.clone()),
        Placement::Shard { .. } => operand.shard().and_then(|(dim, lengths)| follow(dim, lengths)),
        Placement::Local | Placement::Fill | Placement::Replicate => None,
    };
    Plan::in_place(operand, output)
}

/// The output dim whose rows are made of the rows of input dim `dim`, which is longer than 1.
///
/// Dims of length 1 aside, both shapes fall into the smallest groups of neighbours with equal products: `[2, 6, 5]` and
/// `[4, 3, 5]` into `2 * 6 = 4 * 3` and `5 = 5`. Within a group the elements of some rows lie together only if these are
/// rows of its outermost dim; so that one is found again in the outermost dim of the output's group.
fn rows_of(from: &[usize], dim: usize, to: &[usize]) -> Option<usize> {
    if from.contains(&0) {
        return None;
    }
    let next = |shape: &[usize], start: usize| (start..shape.len()).find(|&dim| shape[dim] > 1);
    let (mut input, mut output) = (0, 0);
    loop {
        (input, output) = (next(from, input)?, next(to, output)?);
        let outermost = (input, output);
        let (mut product, mut goal) = (from[input], to[output]);
        while product != goal {
            if product < goal {
                input = next(from, input + 1)?;
                product *= from[input];
            } else {
                output = next(to, output + 1)?;
                goal *= to[output];
            }
        }
        if dim <= input {
            return (dim == outermost.0).then_some(outermost.1);
        }
        (input, output) = (input + 1, output + 1);
    }
}
