//! One optimizer step of a rank: where a gradient goes between backward and the optimizer.

use core::num::NonZeroUsize;
use std::sync::Arc;

use bonfire_collectives::Communicator;
use burn::{
    module::AutodiffModule,
    optim::GradientsParams,
    tensor::{
        Tensor, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
        ops::FloatTensorOps,
    },
};
use serde::{Deserialize, Serialize};

use crate::{
    GradientSink, LossWeight, Parameter, ReduceDType, Reduction, TrainError,
    accumulator::{Accumulator, Sink},
    bucket::BucketCaps,
    check_consistency, compare_parameters, parameters,
    reducer::{Reduced, Reducer, ReducerOptions},
    window::Weights,
};

/// How ranks keep their models equal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SyncOptions {
    /// What a window's gradient is: the mean over all items (default), or the sum over ranks of their means.
    ///
    /// With the sum the gradient grows with the number of ranks, and so would the learning rate that fits.
    pub reduction: Reduction,
    /// The dtype in which gradients travel: `f32` (default: at least f32), `bf16` or `f16`.
    pub reduce_dtype: ReduceDType,
    /// The size of the first bucket of gradients, in bytes; small, so that it is on its way soon. 1 MiB.
    pub first_bucket_cap_bytes: usize,
    /// The size of all other buckets of gradients, in bytes. 25 MiB.
    pub bucket_cap_bytes: usize,
    /// Local SGD: instead of gradients, every so many windows the parameters are averaged, by items. Off by default.
    ///
    /// In between each rank trains alone; optimizer states stay its own. [`DataParallel`](crate::DataParallel) averages at
    /// the end of each epoch too.
    ///
    /// In a file, 0 is none.
    #[serde(with = "zero_is_none")]
    pub average_every: Option<NonZeroUsize>,
    /// After the first window, and then every so many, ranks compare hashes of their parameters; none: never. 1000.
    ///
    /// In a file, 0 is none.
    #[serde(with = "zero_is_none")]
    pub check_every: Option<NonZeroUsize>,
}

impl Default for SyncOptions {
    fn default() -> Self {
        let BucketCaps { first_bytes, bytes } = BucketCaps::default();
        Self {
            reduction: Reduction::default(),
            reduce_dtype: ReduceDType::default(),
            first_bucket_cap_bytes: first_bytes,
            bucket_cap_bytes: bytes,
            average_every: None,
            check_every: NonZeroUsize::new(1000),
        }
    }
}

/// A number of times, or never: TOML has no word for that.
mod zero_is_none {
    use core::num::NonZeroUsize;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[allow(clippy::trivially_copy_pass_by_ref, clippy::ref_option, reason = "serde wants a reference")]
    pub(super) fn serialize<S: Serializer>(every: &Option<NonZeroUsize>, serializer: S) -> Result<S::Ok, S::Error> {
        every.map_or(0, NonZeroUsize::get).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<NonZeroUsize>, D::Error> {
        Ok(Option::<usize>::deserialize(deserializer)?.and_then(NonZeroUsize::new))
    }
}

/// The gradient of a window, for the optimizer.
#[derive(Debug)]
pub struct Window {
    /// The gradients, bitwise equal on all ranks; none for parameters that no rank used.
    pub gradients: GradientsParams,
    /// The sum of weights of all micro steps of all ranks.
    pub weight: f64,
}

/// One rank's side of the steps that all ranks make together.
///
/// ```text
/// model = step.synchronise(model)            once, and after loading a record: rank 0's values
/// for each window:
///     step.micro_step(gradients, items)      any number of times: weighted sum on the device, nothing is sent
///     window = step.finish()                 buckets -> mean over ranks
///     model = optimizer.step(lr, model, window.gradients)
///     model = step.settle(model)             local SGD's average, the check for drift
/// ```
///
/// Ranks may have different numbers of micro steps and items, or none, but all call `finish` and `settle` once for
/// each window. Clip gradients between `finish` and the optimizer: [`clip_by_global_norm`](crate::clip_by_global_norm)
/// by the norm of all together; a Burn optimizer's own `with_grad_clipping` clips each parameter by its own norm, and
/// also after `finish`.
///
/// An error breaks the group: it is an error on every rank.
pub struct TrainingStep<B: AutodiffBackend> {
    communicator: Arc<dyn Communicator>,
    options: SyncOptions,
    parameters: Arc<[Parameter]>,
    devices: Vec<B::Device>,
    accumulator: Accumulator<B::InnerBackend>,
    sink: Option<Arc<Sink<B::InnerBackend>>>,
    reducer: Reducer,
    num_windows: u64,
    last_check: u64,
    /// Items of this rank since parameters were last averaged.
    weight_since_average: f64,
}

impl<B: AutodiffBackend> TrainingStep<B> {
    /// A step for models like `model`, which all ranks must have built alike, and with the same options.
    ///
    /// # Errors
    ///
    /// [`TrainError::RanksDiffer`] if they have not, [`TrainError::Collective`] if the ranks do not come together,
    /// [`TrainError::ReducerThread`] if no thread can be started.
    pub fn new<M: AutodiffModule<B>>(
        communicator: Arc<dyn Communicator>,
        model: &M,
        options: SyncOptions,
    ) -> Result<Self, TrainError> {
        let all = parameters::parameters::<B, M>(model);
        compare_parameters(&*communicator, &all, &format!("{options:?}"))?;
        let parameters: Arc<[Parameter]> = all.into_iter().filter(|parameter| parameter.is_trained).collect();
        let averages = options.average_every.is_some();
        let reducer_options = ReducerOptions {
            caps: BucketCaps { first_bytes: options.first_bucket_cap_bytes, bytes: options.bucket_cap_bytes },
            // Parameters bear neither halves nor a sum.
            dtype: if averages { ReduceDType::F32 } else { options.reduce_dtype },
            reduction: if averages { Reduction::Mean } else { options.reduction },
        };
        Ok(Self {
            reducer: Reducer::new(communicator.clone(), parameters.clone(), reducer_options)?,
            devices: parameters::trained_devices::<B, M>(model),
            accumulator: Accumulator::new(parameters.clone()),
            communicator,
            options,
            parameters,
            sink: None,
            num_windows: 0,
            last_check: 0,
            weight_since_average: 0.0,
        })
    }

    /// Gives every rank rank 0's parameters and buffers, exactly; all are fresh leaves afterwards.
    ///
    /// Ids stay each rank's own. To be called before the first window, and after a record was loaded, which brings
    /// other ids.
    ///
    /// # Errors
    ///
    /// [`TrainError::RanksDiffer`] if ranks have different models, [`TrainError::Read`] if a tensor cannot be read,
    /// [`TrainError::WindowOpen`] in the middle of a window, [`TrainError::Collective`] if the ranks do not come
    /// together.
    pub fn synchronise<M: AutodiffModule<B>>(&mut self, model: M) -> Result<M, TrainError> {
        self.check_closed("synchronise", self.accumulator.weights.total > 0.0)?;
        let step = Self::new(self.communicator.clone(), &model, self.options.clone())?;
        *self = Self { num_windows: self.num_windows, last_check: self.last_check, ..step };
        let model = parameters::broadcast_parameters(&*self.communicator, model);
        self.or_abort(model)
    }

    /// Adds the gradients of a micro step, which are those of the mean over `weight` items.
    ///
    /// Nothing is sent. Without items (weight 0) the gradients are ignored, so they may be NaN.
    ///
    /// # Errors
    ///
    /// [`TrainError::Weight`] if the weight is negative or not finite, [`TrainError::UnknownGradients`] if gradients
    /// are not of this model, [`TrainError::WindowOpen`] after [`overlapped`](Self::overlapped).
    pub fn micro_step(&mut self, gradients: GradientsParams, weight: f64) -> Result<(), TrainError> {
        self.check_closed("micro_step", false)?;
        self.check_weight(weight)?;
        match self.accumulator.add(gradients, weight) {
            0 => Ok(()),
            num_unknown => {
                self.or_abort(Err(TrainError::UnknownGradients { rank: self.communicator.rank(), num_unknown }))
            }
        }
    }

    /// Where the last micro step of the window, of `weight` items, hands over its gradients while backward runs.
    ///
    /// Instead of [`micro_step`](Self::micro_step); what it hands over is reduced at once, what it does not in
    /// [`finish`](Self::finish), with the same bits.
    ///
    /// # Errors
    ///
    /// [`TrainError::Weight`] if the weight is negative or not finite, [`TrainError::WindowOpen`] after another call.
    pub fn overlapped(&mut self, weight: f64) -> Result<Arc<dyn GradientSink<B::InnerBackend>>, TrainError> {
        self.check_closed("overlapped", false)?;
        self.check_weight(weight)?;
        // Local SGD sends no gradients.
        let messages = self.options.average_every.is_none().then(|| self.reducer.messages());
        let is_sent = messages.is_some();
        let sink = Arc::new(self.accumulator.sink(weight, messages));
        if is_sent {
            self.reducer.open(self.accumulator.weights);
        }
        self.sink = Some(sink.clone());
        Ok(sink)
    }

    /// Ends the window: the gradient of all micro steps of all ranks, or none if no rank has an item.
    ///
    /// With local SGD it is this rank's own, or none if it has no item.
    ///
    /// # Errors
    ///
    /// [`TrainError::Collective`] if the ranks do not come together, [`TrainError::Read`] if a gradient cannot be
    /// read, [`TrainError::GradientShape`] and [`TrainError::GradientTwice`] if a hook handed over what is not the
    /// gradient, [`TrainError::ReducerPanicked`] if the thread that reduces panicked.
    pub fn finish(&mut self) -> Result<Option<Window>, TrainError> {
        if let Some(sink) = self.sink.take() {
            self.accumulator.reclaim(&sink);
            if let Some(parameter) = sink.came_twice() {
                let (rank, parameter) = (self.communicator.rank(), self.parameters[parameter].name.clone());
                return self.or_abort(Err(TrainError::GradientTwice { rank, parameter }));
            }
        }
        self.num_windows += 1;
        self.weight_since_average += self.accumulator.weights.total;
        if self.options.average_every.is_some() {
            return Ok(self.finish_alone());
        }

        if !self.reducer.is_open() {
            self.reducer.open(self.accumulator.weights);
        }
        for bucket in &*self.reducer.buckets() {
            let sums = self.accumulator.read(bucket);
            for (parameter, sum) in self.or_abort(sums)? {
                self.reducer.give(parameter, sum);
            }
        }
        self.accumulator.end();
        Ok(self.reducer.close()?.map(|reduced| self.on_device(reduced)))
    }

    /// What follows the optimizer: with local SGD the average of parameters, and the check for drift, each when due.
    ///
    /// To be called on every rank after each window, whether it had a gradient or not.
    ///
    /// # Errors
    ///
    /// [`TrainError::Drifted`] if ranks have different parameters, [`TrainError::Read`] if a tensor cannot be read,
    /// [`TrainError::Collective`] if the ranks do not come together.
    pub fn settle<M: AutodiffModule<B>>(&mut self, model: M) -> Result<M, TrainError> {
        let is_due = |every: NonZeroUsize| self.num_windows.is_multiple_of(every.get() as u64);
        let (model, is_equal) = match self.options.average_every {
            Some(every) if is_due(every) => (self.average(model)?, true),
            Some(_) => (model, false),
            None => (model, true),
        };
        if let Some(every) = self.options.check_every
            && is_equal
            && (self.last_check == 0 || self.num_windows >= self.last_check + every.get() as u64)
        {
            self.last_check = self.num_windows;
            let checked = check_consistency::<B, M>(&*self.communicator, &model, self.num_windows);
            self.or_abort(checked)?;
        }
        Ok(model)
    }

    /// Averages the parameters of local SGD now, by the items since the last time, so that all ranks have one model again.
    ///
    /// To be called on every rank, between `settle` and the next window. Without local SGD, or with no items since the
    /// last time, it gives the model back.
    ///
    /// # Errors
    ///
    /// [`TrainError::Read`] if a tensor cannot be read, [`TrainError::Collective`] if the ranks do not come together.
    pub fn average<M: AutodiffModule<B>>(&mut self, model: M) -> Result<M, TrainError> {
        if !self.averages() {
            return Ok(model);
        }
        let weight = core::mem::take(&mut self.weight_since_average);
        let values = parameters::read::<B, M>(&model);
        let values = self.or_abort(values)?;
        let is_trained: Vec<bool> =
            parameters::parameters::<B, M>(&model).iter().map(|parameter| parameter.is_trained).collect();
        let trained: Vec<_> = values.into_iter().zip(&is_trained).filter(|(_, is_trained)| **is_trained).collect();
        self.reducer.open(Weights { unit: weight, total: weight });
        for (index, (value, _)) in trained.into_iter().enumerate() {
            if weight > 0.0 {
                self.reducer.give(index, value);
            }
        }
        let Some(Reduced { gradients, .. }) = self.reducer.close()? else { return Ok(model) };
        let mut means = gradients.into_iter();
        let values = is_trained.iter().map(|&is_trained| if is_trained { means.next().flatten() } else { None });
        Ok(parameters::replace(model, values.collect()))
    }

    /// The number of windows that have ended.
    #[must_use]
    pub const fn num_windows(&self) -> u64 {
        self.num_windows
    }

    /// The parameters that are trained, in order.
    #[must_use]
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Whether parameters are averaged instead of gradients.
    pub(crate) const fn averages(&self) -> bool {
        self.options.average_every.is_some()
    }

    /// What a rank's loss counts with synchronised batch norm, where its micro step weighs `weight` in the gradient.
    pub(crate) fn loss_weight(&self, weight: f64) -> LossWeight {
        LossWeight::Of(match self.options.reduction {
            // Local SGD averages parameters by weight, whatever the reduction.
            _ if self.averages() => weight,
            Reduction::Mean => weight,
            // Each rank's mean counts once.
            Reduction::Sum => f64::from(u8::from(weight > 0.0)),
        })
    }

    /// Breaks the group: what a hook handed over was not the gradient, and may have been sent.
    pub(crate) fn other_gradients<T>(&self, num_changed: usize) -> Result<T, TrainError> {
        self.or_abort(Err(TrainError::OtherGradients { rank: self.communicator.rank(), num_changed }))
    }

    fn on_device(&self, reduced: Reduced) -> Window {
        let mut gradients = GradientsParams::new();
        for ((parameter, device), gradient) in self.parameters.iter().zip(&self.devices).zip(reduced.gradients) {
            if let Some(gradient) = gradient {
                register::<B::InnerBackend>(
                    &mut gradients,
                    parameter,
                    B::InnerBackend::float_from_data(gradient, device),
                );
            }
        }
        Window { gradients, weight: reduced.weight }
    }

    fn finish_alone(&mut self) -> Option<Window> {
        let mut gradients = GradientsParams::new();
        let sums: Vec<_> = (0..self.parameters.len()).map(|index| self.accumulator.take(index)).collect();
        let Weights { unit, total } = self.accumulator.end();
        for (parameter, sum) in self.parameters.iter().zip(sums) {
            if let Some(sum) = sum {
                let mean = B::InnerBackend::float_div_scalar(sum, (total / unit).into());
                register::<B::InnerBackend>(&mut gradients, parameter, mean);
            }
        }
        (total > 0.0).then_some(Window { gradients, weight: total })
    }

    fn check_closed(&self, call: &'static str, has_sums: bool) -> Result<(), TrainError> {
        if self.sink.is_none() && !has_sums {
            return Ok(());
        }
        self.or_abort(Err(TrainError::WindowOpen { rank: self.communicator.rank(), call }))
    }

    fn check_weight(&self, weight: f64) -> Result<(), TrainError> {
        if weight.is_finite() && weight >= 0.0 {
            return Ok(());
        }
        self.or_abort(Err(TrainError::Weight { rank: self.communicator.rank(), weight }))
    }

    /// Tells the others of an error that only this rank knows: they would wait for it.
    fn or_abort<T>(&self, result: Result<T, TrainError>) -> Result<T, TrainError> {
        result.inspect_err(|error| {
            let is_known = matches!(
                error,
                TrainError::Collective(_) | TrainError::RanksDiffer { .. } | TrainError::Drifted { .. }
            );
            if !is_known {
                self.communicator.abort(&error.to_string());
            }
        })
    }
}

fn register<B: Backend>(gradients: &mut GradientsParams, parameter: &Parameter, gradient: B::FloatTensorPrimitive) {
    // The container keeps the primitive, which knows how many dimensions it has.
    gradients.register(parameter.id, Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(gradient)));
}
