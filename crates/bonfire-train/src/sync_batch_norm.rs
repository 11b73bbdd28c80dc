//! Batch normalisation over the batches of all ranks.

mod group;
mod normalise;

use core::fmt;

use burn::{
    module::{
        AutodiffModule, Content, Devices, DisplaySettings, HasAutodiffModule, Module, ModuleDisplay,
        ModuleDisplayDefault, ModuleMapper, ModuleVisitor, RunningState,
    },
    nn::BatchNorm,
    tensor::{
        DType, Tensor, TensorData, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
    },
};

pub use group::{LossWeight, SyncGroup};

use crate::TrainError;

/// Batch normalisation whose statistics are those of the global batch, the items of all ranks together.
///
/// Every item counts the same, however many a rank has, forward and backward: outputs, gradients and running statistics
/// are those of one device with the global batch, up to the order of sums. In training each layer costs one small
/// `all_reduce` forward and one backward, for which its statistics are read from the device. In evaluation it is the
/// [`BatchNorm`] inside it. Its record is that layer's too, so either loads what the other has saved.
///
/// All ranks must run the same layers, forward and backward, in the same order, see [`SyncGroup`].
///
/// ```
/// use std::{num::NonZeroUsize, time::Duration};
///
/// use bonfire_collectives::{Communicator, run_ranks};
/// use bonfire_train::{SyncBatchNorm, SyncGroup};
/// use burn::{backend::Autodiff, nn::BatchNormConfig, tensor::Tensor};
/// use burn_flex::Flex;
///
/// type B = Autodiff<Flex>;
///
/// let means = run_ranks(NonZeroUsize::new(2).unwrap(), Duration::from_secs(10), |communicator| {
///     let device = Default::default();
///     let data: &[[f32; 1]] = if communicator.rank() == 0 { &[[1.0], [2.0], [3.0]] } else { &[[10.0]] };
///     let input = Tensor::<B, 1>::from_floats(data.as_flattened(), &device).reshape([data.len(), 1]);
///     let group = SyncGroup::new::<B>(std::sync::Arc::new(communicator));
///     let norm = SyncBatchNorm::new(BatchNormConfig::new(1).with_momentum(1.0).init(&device), &group);
///     let _output = norm.forward(input);
///     norm.into_batch_norm().running_mean.value_sync().into_scalar()
/// });
/// assert_eq!(means, [4.0, 4.0]);
/// ```
///
/// Source: Ioffe and Szegedy, Batch Normalization, 2015; the variance is the biased one, as everywhere in Burn.
#[derive(Debug, Clone)]
pub struct SyncBatchNorm<B: Backend> {
    norm: BatchNorm<B>,
    group: SyncGroup,
    /// Counted from 0 within the group.
    layer: usize,
}

impl<B: Backend> SyncBatchNorm<B> {
    /// Synchronises `norm`, from now on the next layer of `group`.
    ///
    /// Ranks must make their layers in the same order.
    #[must_use]
    pub fn new(norm: BatchNorm<B>, group: &SyncGroup) -> Self {
        let [num_channels] = norm.gamma.lazy_shape().dims();
        Self { norm, layer: group.add_layer(num_channels), group: group.clone() }
    }

    /// The layer alone, with the same parameters and statistics.
    #[must_use]
    pub fn into_batch_norm(self) -> BatchNorm<B> {
        self.norm
    }

    /// Normalises `[batch, channels, ...]`; the batch is this rank's share, and may be empty.
    ///
    /// # Panics
    ///
    /// With what [`try_forward`](Self::try_forward) gives as an error. Backward panics with
    /// [`TrainError::SyncBatchNorm`] if the ranks do not come together in it.
    #[must_use]
    pub fn forward<const D: usize>(&self, input: Tensor<B, D>) -> Tensor<B, D> {
        self.try_forward(input).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Normalises `[batch, channels, ...]`; the batch is this rank's share, and may be empty.
    ///
    /// # Errors
    ///
    /// [`TrainError::SyncBatchNorm`] if the ranks do not come together or are at different layers,
    /// [`TrainError::SyncBackend`] if the group was made for another backend, [`TrainError::Read`] if statistics cannot
    /// be read.
    ///
    /// # Panics
    ///
    /// If the input has fewer than two dims, or other channels than the layer.
    pub fn try_forward<const D: usize>(&self, input: Tensor<B, D>) -> Result<Tensor<B, D>, TrainError> {
        if !B::ad_enabled(&input.device()) {
            return Ok(self.norm.forward(input));
        }
        let dims = input.dims();
        let [num_channels] = self.norm.gamma.dims();
        assert!(D >= 2 && dims[1] == num_channels, "a batch norm of {num_channels} channels got {dims:?}");
        let size: usize = dims[2..].iter().product();
        let input = input.reshape([dims[0], num_channels, size]).into_primitive().tensor();

        let normalised = self.group.normalise::<B>(self.layer, self.norm.epsilon, input)?;
        if let Some([mean, variance]) = normalised.statistics {
            self.follow(&self.norm.running_mean, mean);
            self.follow(&self.norm.running_var, variance);
        }
        let mut shape = [1; D];
        shape[1] = num_channels;
        let output = Tensor::<B, 3>::from_primitive(TensorPrimitive::Float(normalised.output)).reshape(dims);
        Ok(output.mul(self.norm.gamma.val().reshape(shape)).add(self.norm.beta.val().reshape(shape)))
    }

    fn follow(&self, running: &RunningState<Tensor<B, 1>>, now: Vec<f64>) {
        let before = running.value_sync();
        let now = vector::<B>(now, before.dtype(), &before.device());
        let momentum = self.norm.momentum;
        running.update(before.mul_scalar(1.0 - momentum).add(now.mul_scalar(momentum)).detach());
    }
}

/// Host values as a tensor.
fn vector<B: Backend>(values: Vec<f64>, dtype: DType, device: &B::Device) -> Tensor<B, 1> {
    let length = values.len();
    let data = TensorData::new(values, [length]).convert_dtype(dtype);
    Tensor::from_primitive(TensorPrimitive::Float(B::float_from_data(data, device)))
}

// By hand, since a derived module would have a record of its own.
impl<B: Backend> Module<B> for SyncBatchNorm<B> {
    type Record = <BatchNorm<B> as Module<B>>::Record;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.norm.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        Self { norm: self.norm.fork(device), ..self }
    }

    fn to_device(self, device: &B::Device) -> Self {
        Self { norm: self.norm.to_device(device), ..self }
    }

    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        self.norm.visit(visitor);
    }

    fn map<M: ModuleMapper<B>>(self, mapper: &mut M) -> Self {
        Self { norm: self.norm.map(mapper), ..self }
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self { norm: self.norm.load_record(record), ..self }
    }

    fn into_record(self) -> Self::Record {
        self.norm.into_record()
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for SyncBatchNorm<B> {
    type InnerModule = SyncBatchNorm<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        SyncBatchNorm { norm: self.norm.valid(), group: self.group.clone(), layer: self.layer }
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        Self { norm: BatchNorm::from_inner(module.norm), group: module.group, layer: module.layer }
    }
}

impl<B: AutodiffBackend> HasAutodiffModule<B> for SyncBatchNorm<B::InnerBackend> {
    type TrainModule = SyncBatchNorm<B>;
}

impl<B: Backend> ModuleDisplayDefault for SyncBatchNorm<B> {
    fn content(&self, content: Content) -> Option<Content> {
        let [num_features] = self.norm.gamma.lazy_shape().dims();
        content
            .add("num_features", &num_features)
            .add("momentum", &self.norm.momentum)
            .add("epsilon", &self.norm.epsilon)
            .add("world_size", &self.group.world_size())
            .optional()
    }

    fn num_params(&self) -> usize {
        Module::num_params(self)
    }
}

impl<B: Backend> ModuleDisplay for SyncBatchNorm<B> {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }
}

impl<B: Backend> fmt::Display for SyncBatchNorm<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ModuleDisplay::format(self, DisplaySettings::default()))
    }
}
