//! A whole epoch of `burn-train`'s learner: its own strategy for one device, and ours with one rank.

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

use bonfire::{
    collectives::ThreadCommunicator,
    train::{DataParallel, DataParallelConfig, DataParallelTraining, DistributedDataLoaderBuilder},
};
use burn::{
    backend::Autodiff,
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    module::{AutodiffModule, Module},
    nn::loss::CrossEntropyLossConfig,
    optim::AdamConfig,
    tensor::{
        Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
    train::{
        ClassificationOutput, InferenceStep, Learner, LearnerSummary, SupervisedTraining, TrainOutput, TrainStep,
        metric::{LossMetric, MetricDefinition},
        renderer::{
            EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
            MetricsRendererTraining, ProgressType, TrainingProgress,
        },
    },
};
use burn_flex::{Flex, FlexDevice};

use crate::{
    contenders::{Contender, once},
    rounds::{Goal, Rounds},
    subjects::{CnnModel, MlpModel},
};

type B = Autodiff<Flex>;

/// Pixels of an image of 28 x 28, and the class of image `item`.
fn image(item: usize) -> (impl Iterator<Item = f32>, i32) {
    ((0..784).map(move |pixel| ((pixel * 31 + item * 7) % 255) as f32 / 255.0), (item % 10) as i32)
}

#[derive(Clone)]
struct Images;

#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    images: Tensor<B, 4>,
    labels: Tensor<B, 1, Int>,
}

impl<B: Backend> Batcher<B, usize, Batch<B>> for Images {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Batch<B> {
        let pixels: Vec<f32> = items.iter().flat_map(|&item| image(item).0).collect();
        let labels: Vec<i32> = items.iter().map(|&item| image(item).1).collect();
        Batch {
            images: Tensor::from_data(TensorData::new(pixels, [items.len(), 1, 28, 28]), device),
            labels: Tensor::from_data(TensorData::new(labels, [items.len()]), device),
        }
    }
}

/// A model of the benches, as the learner wants it.
pub trait Classifier<B: Backend>: Module<B> {
    fn new(device: &B::Device) -> Self;
}

macro_rules! classifier {
    ($model:ident) => {
        impl<B: Backend> Classifier<B> for $model<B> {
            fn new(device: &B::Device) -> Self {
                $model::new(device)
            }
        }

        impl<B: Backend> InferenceStep for $model<B> {
            type Input = Batch<B>;
            type Output = ClassificationOutput<B>;

            fn step(&self, batch: Batch<B>) -> ClassificationOutput<B> {
                let scores = self.forward(batch.images);
                let loss = CrossEntropyLossConfig::new().init(&scores.device());
                ClassificationOutput::new(loss.forward(scores.clone(), batch.labels.clone()), scores, batch.labels)
            }
        }

        impl<B: AutodiffBackend> TrainStep for $model<B> {
            type Input = Batch<B>;
            type Output = ClassificationOutput<B>;

            fn step(&self, batch: Batch<B>) -> TrainOutput<ClassificationOutput<B>> {
                let output = InferenceStep::step(self, batch);
                TrainOutput::new(self, output.loss.backward(), output)
            }
        }
    };
}

classifier!(CnnModel);
classifier!(MlpModel);

/// The learner with our strategy and loader, and one rank, over itself as it comes.
pub fn one_rank<M>(name: &str, batch_size: usize, num_steps: usize, goal: Goal)
where
    M: Classifier<B>
        + AutodiffModule<B>
        + TrainStep<Input = Batch<B>, Output = ClassificationOutput<B>>
        + core::fmt::Display
        + 'static,
    M::InnerModule: InferenceStep<Input = Batch<Flex>, Output = ClassificationOutput<Flex>>,
{
    let rounds =
        Rounds::measure(vec![epoch::<M>(false, batch_size, num_steps), epoch::<M>(true, batch_size, num_steps)]);
    rounds.report(&format!("{name}: time of an epoch with one rank over burn-train's own strategy"), 1, 0, goal);
}

/// An epoch of `num_steps` steps, with one batch of validation.
fn epoch<M>(on_rank: bool, batch_size: usize, num_steps: usize) -> Contender
where
    M: Classifier<B>
        + AutodiffModule<B>
        + TrainStep<Input = Batch<B>, Output = ClassificationOutput<B>>
        + core::fmt::Display
        + 'static,
    M::InnerModule: InferenceStep<Input = Batch<Flex>, Output = ClassificationOutput<Flex>>,
{
    once(move || {
        let folder = tempfile::tempdir().expect("a folder");
        let (rank, train, valid) = if on_rank {
            let mut group = ThreadCommunicator::group(NonZeroUsize::MIN, Duration::from_secs(10));
            let communicator = Arc::new(group.pop().expect("one rank"));
            let rank = DataParallel::new(communicator, DataParallelConfig::default());
            let train = distributed::<B>(batch_size, num_steps * batch_size);
            let valid = distributed::<Flex>(batch_size, batch_size);
            let rank = rank.with_train_loader(&train).with_valid_loader(&valid);
            (Some(rank), Arc::new(train) as Arc<dyn DataLoader<B, _>>, Arc::new(valid) as Arc<dyn DataLoader<Flex, _>>)
        } else {
            (None, plain(batch_size, num_steps * batch_size), plain(batch_size, batch_size))
        };
        let training = SupervisedTraining::new(folder.path(), train, valid)
            .metric_train_numeric(LossMetric::<Flex>::new())
            .renderer(Silent)
            .with_application_logger(None)
            .num_epochs(1);
        let training = match rank {
            Some(rank) => training.data_parallel(rank),
            None => training,
        };
        let model = <M as Classifier<B>>::new(&FlexDevice);
        training.launch(Learner::new(model, AdamConfig::new().init(), 1e-3));
    })
}

fn plain<B: Backend>(batch_size: usize, num_items: usize) -> Arc<dyn DataLoader<B, Batch<B>>> {
    DataLoaderBuilder::new(Images).batch_size(batch_size).build(InMemDataset::new((0..num_items).collect()))
}

fn distributed<B: Backend>(
    batch_size: usize,
    num_items: usize,
) -> bonfire::train::DistributedDataLoader<B, usize, Batch<B>> {
    let loader = DistributedDataLoaderBuilder::new(Images).batch_size(batch_size);
    loader.build(InMemDataset::new((0..num_items).collect())).expect("a loader")
}

/// Shows nothing.
struct Silent;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}
