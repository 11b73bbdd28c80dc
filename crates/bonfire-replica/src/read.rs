//! Reading a tensor to the host.

use std::sync::Arc;

use bonfire_collectives::CollectiveError;
use bonfire_placement::Placement;
use burn_backend::{Bytes, ExecutionError, Shape, TensorData};
use crossbeam_channel::{Sender, bounded};

use crate::{
    Member,
    balance::Cost,
    group::{MemberContext, Task},
    member,
    redistribute::{Scope, Source},
    tensor::{Reading, ReplicaTensor},
    value::Kind,
};

/// Reads the whole tensor. Values at home are read as the inner backend does; a replicated one is read from the first
/// member, a sharded one part by part.
///
/// # Errors
///
/// The inner backend's, for a tensor at home.
///
/// # Panics
///
/// With the first cause, if the group is broken or breaks before the values are there: an error returned here would
/// reach the user of Burn's metrics without its message.
pub(crate) async fn into_data<B: Member, K: Kind<B>>(
    tensor: ReplicaTensor<B, K>,
) -> Result<TensorData, ExecutionError> {
    if !tensor.placement().is_spread() {
        tensor.device_ref().group.assert_whole();
        return K::erase(tensor.into_home().1).into_data().await;
    }
    let tensor = tensor.erase();
    let device = tensor.device.clone();
    let (shape, dtype) = (tensor.shape.clone(), tensor.storage.dtype);
    let placement = match &tensor.storage.placement {
        Placement::Partial { .. } => Placement::Replicate,
        own => own.clone(),
    };
    let order = device.group.order();
    order.form_sums(std::iter::once(&tensor.storage), Scope::Read);
    let (sender, receiver) = bounded(device.num_members());
    order.enqueue(Arc::new(ReadTask {
        source: order.source(tensor, &placement, Reading::Take),
        placement: placement.clone(),
        sender,
    }));
    drop(order);
    let members = (0..device.num_members()).filter(|&rank| is_read(&placement, rank));
    let parts = device.group.collect(&receiver, members).unwrap_or_else(|error| panic!("{error}"));
    let parts: Vec<TensorData> = parts.into_iter().map(|(_, data)| data).collect();
    Ok(match placement {
        Placement::Shard { dim, .. } if parts.len() > 1 => join(parts, dim, shape, dtype),
        _ => parts.into_iter().next().expect("at least one member has a part"),
    })
}

/// Which members' values are read.
fn is_read(placement: &Placement, rank: usize) -> bool {
    match placement {
        Placement::Shard { lengths, .. } => lengths.of(rank) > 0,
        _ => rank == 0,
    }
}

struct ReadTask<B: Member> {
    source: Source<B>,
    placement: Placement,
    sender: Sender<(usize, TensorData)>,
}

impl<B: Member> Task<B> for ReadTask<B> {
    fn operation(&self) -> &'static str {
        "read"
    }

    fn cost(&self, _rank: usize) -> Cost {
        Cost::Collective
    }

    fn run(&self, context: &MemberContext<B>) -> Result<(), CollectiveError> {
        if is_read(&self.placement, context.rank) {
            // The reader may have given up waiting.
            let _ = self.sender.send((context.rank, member::read(self.source.fetch(context))));
        }
        Ok(())
    }
}

/// Joins parts along `dim`, in order.
fn join(parts: Vec<TensorData>, dim: usize, shape: Shape, dtype: burn_backend::DType) -> TensorData {
    let row_bytes: usize = shape[dim + 1..].iter().product::<usize>() * dtype.size();
    let num_blocks: usize = shape[..dim].iter().product();
    let mut bytes = Vec::with_capacity(shape.num_elements() * dtype.size());
    for block in 0..num_blocks {
        for part in &parts {
            let block_bytes = part.shape[dim] * row_bytes;
            bytes.extend_from_slice(&part.bytes[block * block_bytes..][..block_bytes]);
        }
    }
    TensorData { bytes: Bytes::from_bytes_vec(bytes), shape, dtype }
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;

    use super::*;

    #[test]
    fn parts_of_unequal_length_are_joined_along_any_dim() {
        let whole: Vec<i32> = (0..24).collect();
        for dim in 0..3 {
            let shape = [2usize, 3, 4];
            let cut = 1;
            let part = |range: std::ops::Range<usize>| {
                let mut part_shape = shape;
                part_shape[dim] = range.len();
                let index = |i: usize, j: usize, k: usize| (i * 3 + j) * 4 + k;
                let values: Vec<i32> = (0..shape[0])
                    .flat_map(|i| (0..shape[1]).flat_map(move |j| (0..shape[2]).map(move |k| [i, j, k])))
                    .filter(|at| range.contains(&at[dim]))
                    .map(|at| whole[index(at[0], at[1], at[2])])
                    .collect();
                TensorData::new(values, part_shape)
            };
            let joined = join(vec![part(0..cut), part(cut..shape[dim])], dim, shape.into(), DType::I32);
            assert_eq!(joined.to_vec::<i32>().unwrap(), whole, "dim {dim}");
        }
    }
}
