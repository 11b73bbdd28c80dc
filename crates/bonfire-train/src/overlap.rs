//! Gradients reduced while backward still runs, where the step allows it.

use std::sync::Arc;

use burn::{
    module::{AutodiffModule, ParamId},
    optim::GradientsParams,
    tensor::backend::{AutodiffBackend, Backend},
};

use crate::{AnyHooks, GradientSink, Hooks, TrainError, TrainingStep};

/// Windows that are watched before anything is handed over early.
const NUM_PROBES: usize = 2;

/// Chooses, for the last micro step of each window, between gradients during backward and after it.
///
/// The first windows run with hooks that only watch. If these see the gradients that the step gives, later windows hand
/// them over during backward; if not, since the step runs several backward passes or changes its gradients, all come
/// after it. The bits are the same either way, so ranks need not choose alike.
///
/// It pays where communication runs beside an accelerator: with CPU ranks both want the same cores.
#[derive(Debug)]
pub struct Overlap<B: AutodiffBackend> {
    state: State<B>,
}

#[derive(Debug)]
enum State<B: AutodiffBackend> {
    Off,
    Watching { hooks: Hooks<B>, num_left: usize },
    On(Hooks<B>),
}

impl<B: AutodiffBackend> Overlap<B> {
    /// All gradients after backward.
    #[must_use]
    pub const fn off() -> Self {
        Self { state: State::Off }
    }

    /// Gradients during backward, if the step allows it.
    #[must_use]
    pub const fn new(hooks: Hooks<B>) -> Self {
        Self { state: State::Watching { hooks, num_left: NUM_PROBES } }
    }

    /// [`new`](Self::new) if the hooks were made for `B`, else [`off`](Self::off).
    #[must_use]
    pub fn with(hooks: &AnyHooks) -> Self {
        hooks.get().map_or_else(Self::off, Self::new)
    }

    /// Whether gradients are handed over during backward now.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        matches!(self.state, State::On(_))
    }

    /// Runs the last micro step of a window, of `weight` items, on `model` or a copy of it, and gives its gradients to
    /// `step`, which is to be finished next.
    ///
    /// `run` gives the gradients, and what else the caller wants.
    ///
    /// # Errors
    ///
    /// [`TrainError::OtherGradients`] if a step that was fit for hooks no longer is; those of
    /// [`TrainingStep::micro_step`].
    pub fn micro_step<M: AutodiffModule<B>, T>(
        &mut self,
        step: &mut TrainingStep<B>,
        model: &M,
        weight: f64,
        run: impl FnOnce(&M) -> (GradientsParams, T),
    ) -> Result<T, TrainError> {
        match &mut self.state {
            State::Off => {
                let (gradients, output) = run(model);
                step.micro_step(gradients, weight)?;
                Ok(output)
            }
            State::Watching { hooks, num_left } => {
                let hooks = *hooks;
                let hooked = hooks.hook(model, Arc::new(Nowhere));
                let (gradients, output) = run(&hooked.model);
                let report = hooked.finish(&gradients);
                *num_left -= 1;
                if !report.holds() {
                    tracing::warn!(
                        num_changed = report.changed.len(),
                        "gradients are reduced after backward: the training step runs it several times, or changes them"
                    );
                    self.state = State::Off;
                } else if *num_left == 0 {
                    self.state = State::On(hooks);
                }
                step.micro_step(gradients, weight)?;
                Ok(output)
            }
            State::On(hooks) => {
                let hooked = hooks.hook(model, step.overlapped(weight)?);
                let (gradients, output) = run(&hooked.model);
                let report = hooked.finish(&gradients);
                if !report.holds() {
                    return step.other_gradients(report.changed.len());
                }
                Ok(output)
            }
        }
    }
}

/// Takes gradients for the sake of the report.
struct Nowhere;

impl<I: Backend> GradientSink<I> for Nowhere {
    fn ready(&self, _: ParamId, _: I::FloatTensorPrimitive) {}
}
