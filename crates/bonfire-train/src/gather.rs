//! What the ranks' steps gave, brought to rank 0: there, metrics see what one device would have given.

mod outputs;

use bonfire_collectives::{Buffer, BufferMut, Communicator};
use burn::{
    tensor::{TensorData, backend::Backend},
    train::ItemLazy,
};
use serde::{Deserialize, Serialize};

use crate::TrainError;

/// A part of what a step gives, in host memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum OutputPart {
    /// `[items, ...]`: the ranks' items follow each other in rank order; those that only pad a batch are left out.
    Rows(TensorData),
    /// A mean over items, of any shape: the mean over all ranks' items is formed, in f64.
    Mean(TensorData),
    /// `[1]` or `[items]`: a loss, [`Mean`](Self::Mean) or [`Rows`](Self::Rows) by its length.
    ///
    /// Where every rank has a single item it is a mean.
    Loss(TensorData),
}

/// What a step gives, in parts that can be sent from rank to rank and joined.
///
/// Implemented for the outputs of `burn-train`, and for `()`. The parts are of one number and kind on all ranks.
///
/// ```
/// use bonfire_train::{GatherOutput, OutputPart};
/// use burn::tensor::{Tensor, TensorData, backend::Backend};
/// use burn::train::ItemLazy;
///
/// struct Segmentation<B: Backend> {
///     loss: Tensor<B, 1>,
///     /// `[batch, height, width]`
///     mask: Tensor<B, 3>,
/// }
///
/// # impl<B: Backend> ItemLazy for Segmentation<B> {
/// #     type ItemSync = ();
/// #     fn sync(self) {}
/// # }
/// impl<B: Backend> GatherOutput<B> for Segmentation<B> {
///     fn into_parts(self) -> Vec<OutputPart> {
///         vec![OutputPart::Loss(self.loss.into_data()), OutputPart::Rows(self.mask.into_data())]
///     }
///
///     fn from_parts(parts: Vec<TensorData>, device: &B::Device) -> Self {
///         let [loss, mask] = parts.try_into().expect("as many as were sent");
///         Self { loss: Tensor::from_data(loss, device), mask: Tensor::from_data(mask, device) }
///     }
/// }
/// ```
pub trait GatherOutput<B: Backend>: ItemLazy + Sized {
    /// The parts, in an order that is always the same.
    fn into_parts(self) -> Vec<OutputPart>;

    /// The output of which these are the parts, in the same order.
    fn from_parts(parts: Vec<TensorData>, device: &B::Device) -> Self;
}

/// What one rank's micro step gave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Share {
    /// Of its mean among the means of all ranks.
    pub(crate) weight: f64,
    /// With padding.
    pub(crate) num_items: usize,
    /// How many of them, at the end, only pad the batch.
    pub(crate) num_padded: usize,
    pub(crate) parts: Vec<OutputPart>,
}

/// What this rank tells the others of its part of a window.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Report {
    /// Without padding.
    pub(crate) num_items: usize,
    /// This rank has no more items.
    pub(crate) is_last: bool,
    /// This rank was asked to stop.
    pub(crate) stops: bool,
}

/// What all ranks know of a window.
#[derive(Debug)]
pub(crate) struct Agreed {
    /// Over all ranks, without padding.
    pub(crate) num_items: usize,
    /// No rank has more items.
    pub(crate) is_last: bool,
    /// The ranks that were asked to stop.
    pub(crate) stopping: Vec<usize>,
    /// Of each rank's message to rank 0.
    num_bytes: Vec<usize>,
}

/// Tells all ranks of each other's part of a window: one `all_gather` of four numbers.
pub(crate) fn agree(
    communicator: &dyn Communicator,
    report: Report,
    message: Option<&Message>,
) -> Result<Agreed, TrainError> {
    const FIELDS: usize = 4;
    let world_size = communicator.world_size();
    let num_bytes = message.map_or(0, |Message(bytes)| bytes.len());
    let own = [report.num_items as u64, u64::from(report.is_last), u64::from(report.stops), num_bytes as u64];
    let mut all = vec![0_u64; FIELDS * world_size];
    let lengths = vec![FIELDS; world_size];
    communicator.all_gather(Buffer::from_slice(&own), &lengths, BufferMut::from_slice(&mut all))?;
    let reports: Vec<&[u64]> = all.chunks(FIELDS).collect();
    Ok(Agreed {
        num_items: reports.iter().map(|report| report[0] as usize).sum(),
        is_last: reports.iter().all(|report| report[1] == 1),
        stopping: (0..world_size).filter(|&rank| reports[rank][2] == 1).collect(),
        num_bytes: reports.iter().map(|report| report[3] as usize).collect(),
    })
}

/// A rank's shares of a window, by micro step; none where it had no item.
#[derive(Debug)]
pub(crate) struct Message(Vec<u8>);

impl Message {
    pub(crate) fn new(shares: &[Option<Share>]) -> Result<Self, TrainError> {
        rmp_serde::to_vec(shares)
            .map(Self)
            .map_err(|error| TrainError::Internal { reason: format!("cannot send the outputs of a window: {error}") })
    }
}

/// Brings all ranks' shares to rank 0, where the answer has them by rank; elsewhere it is empty.
pub(crate) fn collect(
    communicator: &dyn Communicator,
    agreed: &Agreed,
    message: &Message,
) -> Result<Vec<Vec<Option<Share>>>, TrainError> {
    let Message(own) = message;
    if communicator.rank() > 0 {
        if !own.is_empty() {
            communicator.send(Buffer::from_slice(own), 0)?;
        }
        return Ok(Vec::new());
    }
    let mut by_rank = vec![read(0, own)?];
    for (rank, &num_bytes) in agreed.num_bytes.iter().enumerate().skip(1) {
        let mut bytes = vec![0; num_bytes];
        if num_bytes > 0 {
            communicator.recv(BufferMut::from_slice(&mut bytes), rank)?;
        }
        by_rank.push(read(rank, &bytes)?);
    }
    Ok(by_rank)
}

fn read(rank: usize, bytes: &[u8]) -> Result<Vec<Option<Share>>, TrainError> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    rmp_serde::from_slice(bytes)
        .map_err(|error| TrainError::Internal { reason: format!("the outputs of rank {rank} cannot be read: {error}") })
}

/// The shares of each micro step with their ranks, in rank order.
pub(crate) fn by_micro_step(by_rank: Vec<Vec<Option<Share>>>) -> Vec<Vec<(usize, Share)>> {
    let num_steps = by_rank.iter().map(Vec::len).max().unwrap_or(0);
    let mut steps: Vec<Vec<(usize, Share)>> = vec![Vec::new(); num_steps];
    for (rank, shares) in by_rank.into_iter().enumerate() {
        for (step, share) in steps.iter_mut().zip(shares) {
            step.extend(share.map(|share| (rank, share)));
        }
    }
    steps
}

/// The parts of a micro step over all ranks.
///
/// # Errors
///
/// [`TrainError::Output`] names a rank whose parts do not fit the first's.
pub(crate) fn merge(shares: &[(usize, Share)]) -> Result<Vec<TensorData>, TrainError> {
    let Some((_, first)) = shares.first() else { return Ok(Vec::new()) };
    let num_parts = first.parts.len();
    for (rank, share) in shares {
        if share.parts.len() != num_parts {
            let problem = format!("it has {} parts, those of other ranks have {num_parts}", share.parts.len());
            return Err(TrainError::Output { rank: *rank, part: num_parts.min(share.parts.len()), problem });
        }
    }
    (0..num_parts).map(|part| merge_part(shares, part)).collect()
}

fn merge_part(shares: &[(usize, Share)], part: usize) -> Result<TensorData, TrainError> {
    let problem = |rank: usize, problem: &str| TrainError::Output { rank, part, problem: problem.into() };
    let pieces = shares.iter().map(|(rank, share)| match &share.parts[part] {
        OutputPart::Rows(data) => (*rank, share, data, Kind::Rows),
        OutputPart::Mean(data) => (*rank, share, data, Kind::Mean),
        OutputPart::Loss(data) => (*rank, share, data, Kind::Loss),
    });
    let pieces: Vec<_> = pieces.collect();
    let (_, _, first, kind) = pieces[0];
    for &(rank, _, data, other) in &pieces {
        if other != kind {
            return Err(problem(rank, "it is of another kind than that of other ranks"));
        }
        if data.dtype != first.dtype {
            return Err(problem(rank, "it has another dtype than that of other ranks"));
        }
    }
    let is_mean = match kind {
        Kind::Rows => false,
        Kind::Mean => true,
        Kind::Loss => pieces.iter().all(|(_, _, data, _)| data.num_elements() == 1),
    };
    let skip = usize::from(!is_mean);
    for &(rank, _, data, _) in &pieces {
        if data.shape.len() != first.shape.len() || data.shape.iter().skip(skip).ne(first.shape.iter().skip(skip)) {
            return Err(problem(rank, "its shape does not fit that of other ranks"));
        }
    }
    if is_mean {
        return Ok(mean(pieces.iter().map(|(_, share, data, _)| (share.weight, *data))));
    }
    let mut bytes = Vec::new();
    let mut num_rows = 0;
    for (rank, share, data, _) in pieces {
        let rows = *data.shape.first().ok_or_else(|| problem(rank, "rows need at least one dimension"))?;
        if kind == Kind::Loss && rows != share.num_items {
            return Err(problem(rank, "a loss has one value, or one for each item"));
        }
        let kept = rows.checked_sub(share.num_padded).ok_or_else(|| problem(rank, "it has fewer rows than padding"))?;
        let row_bytes = data.bytes.len().checked_div(rows).unwrap_or(0);
        bytes.extend_from_slice(&data.bytes[..kept * row_bytes]);
        num_rows += kept;
    }
    let mut shape = first.shape.clone();
    shape[0] = num_rows;
    Ok(TensorData::from_bytes_vec(bytes, shape, first.dtype))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Rows,
    Mean,
    Loss,
}

/// The weighted mean, of the same dtype.
fn mean<'a>(pieces: impl Iterator<Item = (f64, &'a TensorData)> + Clone) -> TensorData {
    let total: f64 = pieces.clone().map(|(weight, _)| weight).sum();
    let mut pieces = pieces.filter(|(weight, _)| *weight > 0.0 || total == 0.0).peekable();
    let &(_, first) = pieces.peek().expect("a rank has a share, and some weight is not 0 unless all are");
    let mut sums = vec![0.0_f64; first.num_elements()];
    let (shape, dtype) = (first.shape.clone(), first.dtype);
    for (weight, data) in pieces {
        for (sum, value) in sums.iter_mut().zip(data.iter::<f64>()) {
            *sum += weight * value;
        }
    }
    let means: Vec<f64> = sums.into_iter().map(|sum| sum / total).collect();
    TensorData::new(means, shape).convert_dtype(dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(weight: f64, num_items: usize, num_padded: usize, part: OutputPart) -> Share {
        Share { weight, num_items, num_padded, parts: vec![part] }
    }

    fn merged(shares: Vec<Share>) -> Result<TensorData, TrainError> {
        let shares: Vec<_> = shares.into_iter().enumerate().collect();
        merge(&shares).map(|mut parts| parts.remove(0))
    }

    #[test]
    fn rows_follow_each_other_without_padding() {
        let rows = |values: &[i32]| OutputPart::Rows(TensorData::new(values.to_vec(), [values.len() / 2, 2]));
        let all = merged(vec![
            share(1.0, 2, 1, rows(&[1, 2, 9, 9])),
            share(0.0, 0, 0, rows(&[])),
            share(1.0, 1, 0, rows(&[3, 4])),
        ]);
        assert_eq!(all.unwrap(), TensorData::new(vec![1, 2, 3, 4], [2, 2]));
    }

    #[test]
    fn means_are_weighted_by_items() {
        let loss = |value: f32| OutputPart::Loss(TensorData::new(vec![value], [1]));
        let all =
            merged(vec![share(3.0, 3, 0, loss(1.0)), share(1.0, 1, 0, loss(5.0)), share(0.0, 2, 2, loss(f32::NAN))]);
        assert_eq!(all.unwrap(), TensorData::new(vec![2.0_f32], [1]));
    }

    #[test]
    fn a_loss_of_each_item_stays_one_even_if_a_rank_has_a_single_item() {
        let loss = |values: &[f32]| OutputPart::Loss(TensorData::new(values.to_vec(), [values.len()]));
        let all = merged(vec![share(2.0, 2, 0, loss(&[1.0, 2.0])), share(1.0, 1, 0, loss(&[3.0]))]);
        assert_eq!(all.unwrap(), TensorData::new(vec![1.0_f32, 2.0, 3.0], [3]));
        let wrong = merged(vec![share(2.0, 2, 0, loss(&[1.0, 2.0])), share(3.0, 3, 0, loss(&[3.0]))]);
        assert!(wrong.unwrap_err().to_string().contains("rank 1"));
    }

    #[test]
    fn parts_that_do_not_fit_name_their_rank() {
        let of = |part| share(1.0, 1, 0, part);
        let float = TensorData::new(vec![1.0_f32], [1]);
        let int = TensorData::new(vec![1_i32], [1]);
        let wide = TensorData::new(vec![1.0_f32, 2.0], [1, 2]);
        for other in [OutputPart::Rows(int), OutputPart::Mean(float.clone()), OutputPart::Rows(wide)] {
            let error = merged(vec![of(OutputPart::Rows(float.clone())), of(other)]).unwrap_err().to_string();
            assert!(error.contains("rank 1"), "{error}");
        }
        let none = Share { weight: 1.0, num_items: 1, num_padded: 0, parts: vec![] };
        let error = merged(vec![of(OutputPart::Rows(float)), none]).unwrap_err().to_string();
        assert!(error.contains("rank 1"), "{error}");
    }
}
