//! What a run shows while it trains: the mean loss of each epoch, and a progress line where Burn's TUI cannot be.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use burn::prelude::*;
use burn::tensor::ElementConversion;
use burn::train::ClassificationOutput;
use burn::train::metric::{Adaptor, Metric, MetricDefinition, MetricMetadata, MetricName, SerializedEntry};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use indicatif::{ProgressBar, ProgressStyle};

/// The mean training loss of each epoch, every image counted once. Clones share it.
///
/// Burn's own loss metric counts every batch once, so that the images of a small last batch count for more.
#[derive(Clone, Debug, Default)]
pub(crate) struct EpochLoss {
    epochs: Arc<Mutex<Vec<Mean>>>,
}

impl EpochLoss {
    /// One mean per epoch that has begun.
    pub(crate) fn means(&self) -> Vec<f64> {
        self.with(|epochs| epochs.iter().map(Mean::value).collect())
    }

    /// Images trained on so far, in all epochs.
    pub(crate) fn num_items(&self) -> usize {
        self.with(|epochs| epochs.iter().map(|mean| mean.num_items).sum())
    }

    fn of_epoch(&self, epoch: usize) -> f64 {
        self.with(|epochs| epochs.get(epoch - 1).map_or(f64::NAN, Mean::value))
    }

    fn add(&self, epoch: usize, batch: &BatchLoss) {
        self.with(|epochs| {
            epochs.resize_with(epochs.len().max(epoch), Mean::default);
            let mean = &mut epochs[epoch - 1];
            mean.sum += batch.mean * batch.num_items as f64;
            mean.num_items += batch.num_items;
        });
    }

    fn with<R>(&self, f: impl FnOnce(&mut Vec<Mean>) -> R) -> R {
        f(&mut self.epochs.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[derive(Debug, Default)]
struct Mean {
    sum: f64,
    num_items: usize,
}

impl Mean {
    fn value(&self) -> f64 {
        self.sum / self.num_items as f64
    }
}

/// The loss of one batch, a mean over its images.
pub(crate) struct BatchLoss {
    mean: f64,
    num_items: usize,
}

impl<B: Backend> Adaptor<BatchLoss> for ClassificationOutput<B> {
    fn adapt(&self) -> BatchLoss {
        let [num_items, _] = self.output.dims();
        BatchLoss { mean: self.loss.clone().into_scalar().elem(), num_items }
    }
}

impl Metric for EpochLoss {
    type Input = BatchLoss;

    fn name(&self) -> MetricName {
        Arc::new("Loss per image".into())
    }

    fn update(&mut self, batch: &BatchLoss, metadata: &MetricMetadata) -> SerializedEntry {
        let epoch = metadata.global_progress.items_processed;
        self.add(epoch, batch);
        let mean = self.of_epoch(epoch);
        SerializedEntry::new(format!("epoch {mean:.4}"), mean.to_string())
    }

    /// Nothing: the epochs are told apart by their number.
    fn clear(&mut self) {}
}

/// One line on stderr that follows the training; one line per epoch where stderr is no terminal.
pub(crate) struct ProgressLine {
    bar: ProgressBar,
    loss: EpochLoss,
    num_reported: usize,
}

impl ProgressLine {
    pub(crate) fn new(loss: EpochLoss) -> Self {
        let style = ProgressStyle::with_template("{prefix} {bar:30} {pos}/{len} {msg}").expect("a valid template");
        Self { bar: ProgressBar::new(0).with_style(style), loss, num_reported: 0 }
    }

    fn show(&self, progress: &TrainingProgress, doing: &'static str) {
        let epochs = &progress.global_progress;
        if let Some(images) = &progress.progress {
            self.bar.set_length(images.items_total as u64);
            self.bar.set_position(images.items_processed as u64);
        }
        self.bar.set_prefix(format!("epoch {}/{} {doing}", epochs.items_processed, epochs.items_total));
        self.bar.set_message(format!("loss {:.4}", self.loss.of_epoch(epochs.items_processed)));
    }
}

impl MetricsRendererTraining for ProgressLine {
    fn update_train(&mut self, _: MetricState) {}

    fn update_valid(&mut self, _: MetricState) {}

    fn render_train(&mut self, progress: TrainingProgress, _: Vec<ProgressType>) {
        self.show(&progress, "training");
    }

    fn render_valid(&mut self, progress: TrainingProgress, _: Vec<ProgressType>) {
        self.show(&progress, "testing ");
        let epochs = &progress.global_progress;
        if self.num_reported < epochs.items_processed {
            self.num_reported = epochs.items_processed;
            let loss = self.loss.of_epoch(epochs.items_processed);
            let line = format!("epoch {}/{}: loss {loss:.4}", epochs.items_processed, epochs.items_total);
            // Nobody may be listening.
            self.bar.suspend(|| drop(writeln!(std::io::stderr(), "{line}")));
        }
    }

    fn on_train_end(&mut self, _: Option<burn::train::LearnerSummary>) -> Result<(), Box<dyn core::error::Error>> {
        self.bar.finish_and_clear();
        Ok(())
    }
}

impl MetricsRendererEvaluation for ProgressLine {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for ProgressLine {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _: MetricDefinition) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_last_batch_counts_by_its_images() {
        let loss = EpochLoss::default();
        loss.add(1, &BatchLoss { mean: 1.0, num_items: 3 });
        loss.add(1, &BatchLoss { mean: 5.0, num_items: 1 });
        loss.clone().add(2, &BatchLoss { mean: 0.5, num_items: 4 });
        assert_eq!(loss.means(), [2.0, 0.5]);
        assert_eq!(loss.num_items(), 8);
    }
}
