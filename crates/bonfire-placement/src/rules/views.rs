//! Ops that move no value between elements: a `Partial` passes through, a `Shard` goes where its dim goes.

use std::ops::Range;

use super::{Operand, Plan, Sharing, lengthy, num_elements};
use crate::{Lengths, Placement, PlacementError};

/// Where the shared dim's rows do not go together, the ranks exchange rows for those of a dim whose rows do.
///
/// `None` if `to` has another number of elements.
pub(super) fn reshape(
    operand: Operand<'_>,
    to: &[usize],
    sharing: Sharing<'_>,
) -> Result<Option<Plan>, PlacementError> {
    let from = operand.shape;
    if num_elements(from) != num_elements(to) {
        return Ok(None);
    }
    let stays = plan(operand, |dim, lengths| {
        let output = rows_of(from, dim, to)?;
        Some(Placement::shard(output, lengths.scaled(to[output], from[dim])?))
    });
    match operand.shard() {
        Some((dim, _)) if stays.outputs[0] == Placement::Replicate => {
            Ok(Some(exchanged(from, dim, to, sharing)?.unwrap_or(stays)))
        }
        Some(_) | None => Ok(Some(stays)),
    }
}

/// The outermost dims of a group, whose rows go together in chunks: of that of the shared dim, if there are chunks for all
/// ranks.
fn exchanged(from: &[usize], dim: usize, to: &[usize], sharing: Sharing<'_>) -> Result<Option<Plan>, PlacementError> {
    let groups = groups(from, to).unwrap_or_default();
    let is_own = |(input, _): &&(Range<usize>, Range<usize>)| input.contains(&dim);
    let (own, others): (Vec<_>, Vec<_>) = groups.iter().partition(is_own);
    let outermost = own.into_iter().chain(others).map(|(input, output)| (input.start, output.start));
    let chunks = outermost.map(|(input, output)| ((input, output), gcd(from[input], to[output])));
    let Some(((input, output), num_chunks)) = lengthy(chunks, sharing.world_size) else { return Ok(None) };
    let lengths = sharing.lengths(num_chunks)?;
    let shard = |dim: usize, length: usize| Some(Placement::shard(dim, lengths.scaled(length, num_chunks)?));
    let placements = shard(input, from[input]).zip(shard(output, to[output]));
    Ok(placements.map(|(input, output)| Plan { inputs: vec![input], outputs: vec![output] }))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
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
/// Within a [group](groups) the elements of some rows lie together only if these are rows of its outermost dim; so that
/// one is found again in the outermost dim of the output's group.
fn rows_of(from: &[usize], dim: usize, to: &[usize]) -> Option<usize> {
    let groups = groups(from, to)?;
    let (input, output) = groups.into_iter().find(|(input, _)| input.contains(&dim))?;
    (dim == input.start).then_some(output.start)
}

/// How a tensor of shape `from` can be stored after a reshape to `to`, if before it is stored as `stored`: a shape of as
/// many dims as `from`, of which some that are 1 stand for longer ones, whose values repeat.
///
/// `None` if the repeats do not fill whole dims of `to`, or the shapes do not fit.
pub fn reshape_stored(from: &[usize], stored: &[usize], to: &[usize]) -> Option<Vec<usize>> {
    if stored.len() != from.len() {
        return None;
    }
    let mut reshaped = vec![1; to.len()];
    for (input, output) in groups(from, to)? {
        let (from, stored) = (&from[input.clone()], &stored[input]);
        if from == stored {
            reshaped[output.clone()].copy_from_slice(&to[output]);
        } else if stored.iter().any(|&length| length != 1) {
            return None;
        }
    }
    Some(reshaped)
}

/// The smallest groups of neighbouring dims of two shapes with equal products, dims of length 1 between them left out:
/// `[2, 6, 5]` and `[4, 3, 5]` fall into `2 * 6 = 4 * 3` and `5 = 5`. Each group starts with a dim longer than 1.
///
/// `None` if the shapes have no elements, or not equally many.
fn groups(from: &[usize], to: &[usize]) -> Option<Vec<(Range<usize>, Range<usize>)>> {
    if from.contains(&0) || num_elements(from) != num_elements(to) {
        return None;
    }
    let next = |shape: &[usize], start: usize| (start..shape.len()).find(|&dim| shape[dim] > 1);
    let mut groups = Vec::new();
    let (mut input, mut output) = (0, 0);
    while let (Some(first_input), Some(first_output)) = (next(from, input), next(to, output)) {
        (input, output) = (first_input + 1, first_output + 1);
        let (mut product, mut goal) = (from[first_input], to[first_output]);
        while product != goal {
            let (shape, end, factor) =
                if product < goal { (from, &mut input, &mut product) } else { (to, &mut output, &mut goal) };
            let dim = next(shape, *end)?;
            *factor *= shape[dim];
            *end = dim + 1;
        }
        groups.push((first_input..input, first_output..output));
    }
    Some(groups)
}

#[cfg(test)]
mod tests {
    use super::reshape_stored;

    #[test]
    fn repeats_survive_a_reshape_that_keeps_their_dims_apart() {
        type Row<'a> = (&'a [usize], &'a [usize], &'a [usize], Option<&'a [usize]>);
        let table: [Row<'_>; 12] = [
            // BatchNorm: `[channels, batch * height * width]` and back.
            (&[3, 24], &[3, 1], &[3, 2, 3, 4], Some(&[3, 1, 1, 1])),
            (&[3, 2, 3, 4], &[3, 1, 1, 1], &[3, 24], Some(&[3, 1])),
            // One gradient for all items of a batch.
            (&[8], &[1], &[8, 1], Some(&[1, 1])),
            (&[8, 1], &[1, 1], &[2, 4], Some(&[1, 1])),
            (&[4, 6], &[4, 1], &[2, 2, 6], Some(&[2, 2, 1])),
            (&[1, 4, 1, 6], &[1, 1, 1, 6], &[4, 2, 3], Some(&[1, 2, 3])),
            (&[6, 1], &[6, 1], &[2, 3], Some(&[2, 3])),
            // Repeated and other dims become one.
            (&[4, 6], &[4, 1], &[24], None),
            (&[4, 6], &[1, 6], &[8, 3], None),
            // No such reshape, no elements, another number of dims.
            (&[4, 6], &[1, 1], &[5, 5], None),
            (&[0, 6], &[1, 1], &[6, 0], None),
            (&[4, 6], &[1], &[6, 4], None),
        ];
        for (from, stored, to, expected) in table {
            assert_eq!(reshape_stored(from, stored, to).as_deref(), expected, "{from:?} as {stored:?} to {to:?}");
        }
    }

    proptest::proptest! {
        /// Whatever a stored shape stands for: reshaping what is stored and repeating it gives the reshaped whole.
        #[test]
        fn a_stored_reshape_repeats_to_the_same_elements(
            dims in proptest::collection::vec((1usize..4, proptest::bool::ANY), 1..4),
            splits in proptest::collection::vec(1usize..4, 1..5),
        ) {
            let from: Vec<usize> = dims.iter().map(|&(length, _)| length * 2).collect();
            let stored: Vec<usize> = dims.iter().map(|&(length, repeats)| if repeats { 1 } else { length * 2 }).collect();
            let total: usize = from.iter().product();
            let mut to = Vec::new();
            let mut rest = total;
            for split in splits {
                if rest.is_multiple_of(split) {
                    to.push(split);
                    rest /= split;
                }
            }
            to.push(rest);
            if let Some(reshaped) = reshape_stored(&from, &stored, &to) {
                proptest::prop_assert_eq!(stored.iter().product::<usize>(), reshaped.iter().product::<usize>());
                for element in 0..total {
                    proptest::prop_assert_eq!(index_of(element, &from, &stored), index_of(element, &to, &reshaped));
                }
            }
        }
    }

    /// Which stored element the row-major `element` of a tensor of shape `shape` is.
    fn index_of(element: usize, shape: &[usize], stored: &[usize]) -> usize {
        let (mut rest, mut stride, mut index) = (element, 1, 0);
        for (&length, &stored) in shape.iter().zip(stored).rev() {
            index += (rest % length) % stored * stride;
            rest /= length;
            stride *= stored;
        }
        index
    }
}
