//! Running statistics, and whatever else of a model no gradient moves, made equal on all ranks.

use core::iter;

use bonfire_collectives::{Buffer, BufferMut, Communicator, DType as WireDType, ReduceOp};
use burn::{
    module::AutodiffModule,
    tensor::{DType, TensorData, backend::AutodiffBackend},
};
use serde::{Deserialize, Serialize};

use crate::{
    TrainError,
    consistency::fingerprint,
    parameters::{Value, replace, visit},
};

/// What becomes of buffers that ranks have moved apart, such as the running statistics of a batch norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BufferSync {
    /// All take those of the lowest rank that had items: rank 0, as a rule.
    #[default]
    Broadcast,
    /// All take the mean, weighted by items. What is not a float is broadcast.
    Average,
    /// Each rank keeps its own, and evaluates with those.
    Off,
}

/// Makes the buffers of a model equal on all ranks, bit for bit.
///
/// Buffers are all tensors that take no gradient. Those that are equal already, frozen weights for example, are only
/// compared, by 8 bytes each; the others go in one more collective, or two for [`BufferSync::Average`]. `weight` is this
/// rank's number of items since the last time; if no rank had any, rank 0's buffers are taken.
///
/// Updates that a batch norm has not taken over yet, as Burn's wait for the next forward pass, are. Clones of the model
/// share its running statistics, so theirs change too.
///
/// # Errors
///
/// On all ranks: [`TrainError::Weight`] if a rank's weight is negative or not finite, [`TrainError::Collective`] if the
/// ranks do not come together or have different buffers. [`TrainError::Read`] if a tensor cannot be read; that breaks
/// the group.
pub fn synchronise_buffers<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: M,
    communicator: &dyn Communicator,
    sync: BufferSync,
    weight: f64,
) -> Result<M, TrainError> {
    if sync == BufferSync::Off {
        return Ok(model);
    }
    // It takes over what waits for the next forward pass; visiting does not.
    let _inner = model.valid();
    let mut buffers = match read::<B, M>(&model) {
        Ok(buffers) => buffers,
        Err(error) => {
            communicator.abort(&error.to_string());
            return Err(error);
        }
    };
    let Comparison { weights, is_equal } = compare(communicator, &buffers, weight)?;
    let mut moving: Vec<&mut TensorData> =
        buffers.iter_mut().flatten().zip(&is_equal).filter(|(_, is_equal)| !**is_equal).map(|(data, _)| data).collect();

    let total: f64 = weights.iter().sum();
    let root = weights.iter().position(|&weight| weight > 0.0).unwrap_or(0);
    if sync == BufferSync::Average && total > 0.0 {
        let (floats, others) = moving.into_iter().partition(|data| is_float(data.dtype));
        average(communicator, floats, weight, total)?;
        moving = others;
    }
    broadcast(communicator, moving, root)?;

    let mut is_equal = is_equal.into_iter();
    for buffer in &mut buffers {
        if buffer.is_some() && is_equal.next() == Some(true) {
            // Left where it is, on its device.
            *buffer = None;
        }
    }
    Ok(replace(model, buffers))
}

/// The values of all tensors of a model that are buffers, by tensor.
fn read<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Result<Vec<Option<TensorData>>, TrainError> {
    let mut buffers = Vec::new();
    let mut problem = None;
    visit(model, |name, _, value: Value<'_, B>| {
        buffers.push(None);
        if value.requires_gradient() {
            return;
        }
        match value.into_data() {
            Ok(data) => *buffers.last_mut().expect("it was just pushed") = Some(data),
            Err(reason) => {
                problem.get_or_insert_with(|| TrainError::Read { parameter: name.join("."), reason });
            }
        }
    });
    problem.map_or(Ok(buffers), Err)
}

struct Comparison {
    /// By rank.
    weights: Vec<f64>,
    /// By buffer.
    is_equal: Vec<bool>,
}

/// Tells which buffers are equal on all ranks, and what every rank weighs.
fn compare(
    communicator: &dyn Communicator,
    buffers: &[Option<TensorData>],
    weight: f64,
) -> Result<Comparison, TrainError> {
    let hashes = buffers.iter().flatten().map(|data| fingerprint(&data.bytes));
    let own: Vec<u64> = iter::once(weight.to_bits()).chain(hashes).collect();
    let world_size = communicator.world_size();
    let mut all = vec![0; own.len() * world_size];
    let lengths = vec![own.len(); world_size];
    communicator.all_gather(Buffer::from_slice(&own), &lengths, BufferMut::from_slice(&mut all))?;
    let weights: Vec<f64> = all.chunks(own.len()).map(|theirs| f64::from_bits(theirs[0])).collect();
    if let Some(rank) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
        return Err(TrainError::Weight { rank, weight: weights[rank] });
    }
    let is_equal = (1..own.len()).map(|index| all.chunks(own.len()).all(|theirs| theirs[index] == own[index]));
    Ok(Comparison { is_equal: is_equal.collect(), weights })
}

/// Replaces floats by their weighted mean, summed in f64.
fn average(
    communicator: &dyn Communicator,
    buffers: Vec<&mut TensorData>,
    weight: f64,
    total: f64,
) -> Result<(), TrainError> {
    // What a rank without items has may be anything, NaN too.
    let share = |value: f64| if weight > 0.0 { value * (weight / total) } else { 0.0 };
    let mut sums: Vec<f64> = buffers.iter().flat_map(|data| data.iter::<f64>()).map(share).collect();
    if sums.is_empty() {
        return Ok(());
    }
    communicator.all_reduce(BufferMut::from_slice(&mut sums), ReduceOp::Sum)?;
    let mut sums = sums.into_iter();
    for data in buffers {
        let values: Vec<f64> = sums.by_ref().take(data.num_elements()).collect();
        *data = TensorData::new(values, data.shape.clone()).convert_dtype(data.dtype);
    }
    Ok(())
}

/// Replaces buffers by those of `root`, in one collective.
fn broadcast(communicator: &dyn Communicator, buffers: Vec<&mut TensorData>, root: usize) -> Result<(), TrainError> {
    let mut bytes: Vec<u8> = buffers.iter().flat_map(|data| data.as_bytes()).copied().collect();
    if bytes.is_empty() {
        return Ok(());
    }
    communicator.broadcast(BufferMut::new(WireDType::U8, &mut bytes)?, root)?;
    let mut rest = bytes.as_slice();
    for data in buffers {
        let (own, after) = rest.split_at(data.bytes.len());
        data.bytes.copy_from_slice(own);
        rest = after;
    }
    Ok(())
}

const fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::Flex32 | DType::F16 | DType::BF16)
}
