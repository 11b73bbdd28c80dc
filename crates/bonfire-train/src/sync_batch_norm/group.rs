//! What the synchronised layers of a rank share, and how they meet those of other ranks.

use core::{any::Any, fmt};
use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use bonfire_collectives::{BufferMut, Communicator, ReduceOp};
use burn::tensor::{backend::Backend, ops::FloatTensor};

use super::normalise::{Layer, Normalise, Normalised, normalise};
use crate::{HookBackend, TrainError};

/// The ranks whose batches [`SyncBatchNorm`](crate::SyncBatchNorm) layers normalise together.
///
/// The layers meet in *rounds*, one per layer forward and one backward. All ranks must come to the same rounds in the
/// same order; a rank that does not is an error on every rank within the timeout, which names whom it waited for.
///
/// A rank that has no items in a micro step, while others have, cannot run the model. Then those that have call
/// [`end_pass`](Self::end_pass) after their backward pass, and those that have not call [`stand_in`](Self::stand_in)
/// instead of forward and backward. Running statistics of the latter stay behind: give them those of a rank that had
/// items ([`synchronise_buffers`](crate::synchronise_buffers)). A rank with an empty batch may run the model as well.
///
/// Ranks that are threads of one process share autodiff's locks: whoever ends a backward pass waits for all that run,
/// and so cannot meet the others in a layer's backward. That is no matter as long as every backward pass follows its
/// own forward pass through these layers. Where another backward pass comes between (in a GAN, say), all ranks call
/// [`align`](Self::align) after it. Processes share no locks.
#[derive(Clone)]
pub struct SyncGroup {
    rounds: Arc<Rounds>,
    /// The [`Normalise`] of the backend that trains, whose type is named where the group is made and nowhere else.
    normalise: Arc<dyn Any + Send + Sync>,
    backend: &'static str,
}

/// How much a rank's loss counts in the mean over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum LossWeight {
    /// The loss is a mean over the items of the batch, and counts as many.
    #[default]
    Items,
    /// The loss counts as much: 1 on every rank for sums over items, or the number of tokens for a mean over those.
    Of(f64),
}

impl SyncGroup {
    /// A group of layers of models that train with backend `B`.
    ///
    /// The communicator must be the layers' own: one that reduces gradients as well, on another thread, would mix up
    /// the collectives.
    #[must_use]
    pub fn new<B: HookBackend>(communicator: Arc<dyn Communicator>) -> Self {
        let rounds = Rounds {
            communicator,
            num_layers: AtomicUsize::new(0),
            max_channels: AtomicUsize::new(0),
            loss_weight: Mutex::new(LossWeight::default()),
        };
        let normalise: Normalise<B> = normalise::<B>;
        Self { rounds: Arc::new(rounds), normalise: Arc::new(normalise), backend: core::any::type_name::<B>() }
    }

    /// The number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.rounds.communicator.world_size()
    }

    /// Says how much this rank's loss counts, from the next forward pass on; [`LossWeight::Items`] at first.
    ///
    /// It must be what the gradients are averaged with, since the gradient of another rank's loss comes here through
    /// the statistics.
    pub fn weigh_loss(&self, weight: LossWeight) {
        *self.rounds.loss_weight.lock().unwrap_or_else(PoisonError::into_inner) = weight;
    }

    /// Ends a forward and backward pass on a rank that has run the model, in micro steps where others may stand in.
    ///
    /// # Errors
    ///
    /// [`TrainError::SyncBatchNorm`] if the ranks do not come together.
    pub fn end_pass(&self) -> Result<(), TrainError> {
        self.rounds.run(Part::End).map(|_| ())
    }

    /// Takes part without items in whatever rounds the others have, until all of them end their pass.
    ///
    /// # Errors
    ///
    /// [`TrainError::SyncBatchNorm`] if the ranks do not come together.
    pub fn stand_in(&self) -> Result<(), TrainError> {
        while self.rounds.run(Part::StandIn)?.is_in_layer {}
        Ok(())
    }

    /// Waits until all ranks have come here.
    ///
    /// # Errors
    ///
    /// [`TrainError::Collective`] if they do not come.
    pub fn align(&self) -> Result<(), TrainError> {
        Ok(self.rounds.communicator.barrier()?)
    }

    pub(crate) fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.rounds.communicator
    }

    pub(super) fn add_layer(&self, num_channels: usize) -> usize {
        self.rounds.max_channels.fetch_max(num_channels, Ordering::Relaxed);
        self.rounds.num_layers.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn normalise<B: Backend>(
        &self,
        index: usize,
        epsilon: f64,
        input: FloatTensor<B>,
    ) -> Result<Normalised<B>, TrainError> {
        let Some(normalise) = self.normalise.downcast_ref::<Normalise<B>>() else {
            return Err(TrainError::SyncBackend { expected: self.backend, given: core::any::type_name::<B>() });
        };
        normalise(Layer { rounds: self.rounds.clone(), index, epsilon }, input)
    }
}

impl fmt::Debug for SyncGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let communicator = &self.rounds.communicator;
        write!(f, "SyncGroup(rank {} of {}, {})", communicator.rank(), communicator.world_size(), self.backend)
    }
}

/// Where this rank meets the others.
pub(super) struct Rounds {
    communicator: Arc<dyn Communicator>,
    num_layers: AtomicUsize,
    max_channels: AtomicUsize,
    loss_weight: Mutex<LossWeight>,
}

/// Half of a layer's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Backward,
}

/// What a rank brings to a round.
pub(super) enum Part {
    /// A layer: a number, and two for each channel.
    Layer { index: usize, pass: Pass, count: f64, values: Vec<f64> },
    /// Its pass is over.
    End,
    /// Nothing.
    StandIn,
}

/// What a round gives to every rank.
pub(super) struct Sums {
    /// Whether any rank was in a layer.
    is_in_layer: bool,
    pub(super) count: f64,
    /// Two for each channel.
    pub(super) values: Vec<f64>,
}

/// How many ranks are in a layer, the sum of their places and of those squared, how many have ended; then the count.
const HEAD: usize = 5;

impl Rounds {
    pub(super) fn loss_weight(&self) -> LossWeight {
        *self.loss_weight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One round, whose length is the same whatever each rank brings, since who stands in cannot know the layer.
    ///
    /// Sums are in f64: that of squares then loses nothing that f32 inputs had.
    pub(super) fn run(&self, part: Part) -> Result<Sums, TrainError> {
        let mut buffer = vec![0.0; HEAD + 2 * self.max_channels.load(Ordering::Relaxed)];
        let num_values = match &part {
            Part::Layer { index, pass, count, values } => {
                let place = place(*index, *pass);
                buffer[..HEAD].copy_from_slice(&[1.0, place, place * place, 0.0, *count]);
                buffer[HEAD..][..values.len()].copy_from_slice(values);
                values.len()
            }
            Part::End => {
                buffer[3] = 1.0;
                0
            }
            Part::StandIn => 0,
        };
        self.communicator
            .all_reduce(BufferMut::from_slice(&mut buffer), ReduceOp::Sum)
            .map_err(|source| TrainError::SyncBatchNorm { at: name_of(&part), source })?;
        let [num_inside, places, squares, num_ended] = [0, 1, 2, 3].map(|index| buffer[index]);
        // Equality of Cauchy and Schwarz: all places are one. Both sides are whole numbers that f64 holds exactly.
        let is_one_place = num_inside * squares == places * places;
        if num_inside > 0.0 && (num_ended > 0.0 || !is_one_place) {
            let (rank, world_size) = (self.communicator.rank(), self.communicator.world_size());
            let error = TrainError::PlacesDiffer { rank, world_size, at: name_of(&part) };
            self.communicator.abort(&error.to_string());
            return Err(error);
        }
        let values = buffer[HEAD..][..num_values].to_vec();
        Ok(Sums { is_in_layer: num_inside > 0.0, count: buffer[HEAD - 1], values })
    }
}

/// A number for each layer and pass, not 0.
fn place(index: usize, pass: Pass) -> f64 {
    (2 * index + 1 + usize::from(pass == Pass::Backward)) as f64
}

fn name_of(part: &Part) -> String {
    match part {
        Part::Layer { index, pass: Pass::Forward, .. } => format!("layer {index} forward"),
        Part::Layer { index, pass: Pass::Backward, .. } => format!("layer {index} backward"),
        Part::End => "the end of a pass".into(),
        Part::StandIn => "a rank without items".into(),
    }
}
