//! `burn-train`'s learner on 1 to 4 ranks against its own strategy for one device.

use std::{
    collections::HashMap,
    num::NonZeroUsize,
    panic::AssertUnwindSafe,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use bonfire::{
    Replica, ReplicaDevice,
    collectives::{Communicator, ProcessGroup, run_groups},
    placement::Shares,
    train::{
        BufferSync, DataParallel, DataParallelConfig, DataParallelTraining, DistributedDataLoader,
        DistributedDataLoaderBuilder, HookBackend, RankBalance, SyncBatchNorm, SyncGroup, Tail,
    },
};
use burn::{
    backend::Autodiff,
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    lr_scheduler::LrScheduler,
    module::{Module, Param},
    nn::{BatchNormConfig, Linear, loss::CrossEntropyLossConfig},
    optim::SgdConfig,
    record::CompactRecorder,
    tensor::{
        Int, Tensor, TensorData,
        activation::tanh,
        backend::{AutodiffBackend, Backend},
    },
    train::{
        ClassificationOutput, InferenceStep, Interrupter, Learner, LearnerSummary, SupervisedTraining, TrainOutput,
        TrainStep,
        logger::MetricLogger,
        metric::{
            AccuracyMetric, AurocMetric, LearningRateMetric, LossMetric, MetricDefinition, MetricId, NumericEntry,
            store::{EpochSummary, MetricsUpdate, Split},
        },
        renderer::{
            EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
            MetricsRendererTraining, ProgressType, TrainingProgress,
        },
    },
};
use burn_flex::Flex;

use crate::step::each_rank;

type B = Autodiff<Flex>;

const NUM_TRAIN: usize = 22;
const NUM_VALID: usize = 14;
const BATCH_SIZE: usize = 6;
const NUM_EPOCHS: usize = 3;
const CLASS_WEIGHTS: [f32; 2] = [1.0, 5.0];

#[derive(Clone)]
struct Points;

fn class(item: &usize) -> usize {
    item % 3 / 2
}

#[derive(Clone, Debug)]
struct Batch<B: Backend> {
    points: Tensor<B, 2>,
    classes: Tensor<B, 1, Int>,
}

impl<B: Backend> Batcher<B, usize, Batch<B>> for Points {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Batch<B> {
        let points: Vec<f32> =
            items.iter().flat_map(|item| (0..4).map(move |dim| ((item * 4 + dim) as f32).sin())).collect();
        let classes: Vec<i64> = items.iter().map(|item| class(item) as i64).collect();
        Batch {
            points: Tensor::from_data(TensorData::new(points, [items.len(), 4]), device),
            classes: Tensor::from_data(TensorData::new(classes, [items.len()]), device),
        }
    }
}

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    hidden: Linear<B>,
    norm: Option<SyncBatchNorm<B>>,
    output: Linear<B>,
    /// The loss is a mean over items weighted by class.
    weighs: bool,
}

impl<B: Backend> Mlp<B> {
    fn new(device: &B::Device) -> Self {
        let tensor = |num: usize, start: f32| {
            let values = (0..num).map(|index| (index as f32 * 1.7 + start).sin() / 2.0).collect::<Vec<_>>();
            Tensor::<B, 1>::from_data(TensorData::new(values, [num]), device)
        };
        let linear = |inputs: usize, outputs: usize, start: f32| Linear {
            weight: Param::from_tensor(tensor(inputs * outputs, start).reshape([inputs, outputs])),
            bias: Some(Param::from_tensor(tensor(outputs, start + 1.0))),
        };
        Self { hidden: linear(4, 8, 0.0), norm: None, output: linear(8, 2, 0.5), weighs: false }
    }

    fn classify(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        let hidden = self.hidden.forward(batch.points);
        let hidden = self.norm.iter().fold(hidden, |hidden, norm| norm.forward(hidden));
        let output = self.output.forward(tanh(hidden));
        let weights = self.weighs.then(|| CLASS_WEIGHTS.to_vec());
        let loss = CrossEntropyLossConfig::new().with_weights(weights).init(&output.device());
        let loss = loss.forward(output.clone(), batch.classes.clone());
        ClassificationOutput::new(loss, output, batch.classes)
    }
}

impl<B: AutodiffBackend> TrainStep for Mlp<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Mlp<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

/// What metrics said, by split and name, in order.
#[derive(Clone, Default)]
struct Recorder {
    names: HashMap<MetricId, String>,
    values: Arc<Mutex<HashMap<String, Vec<f64>>>>,
}

impl Recorder {
    fn of(&self, split: &str, name: &str) -> Vec<f64> {
        self.values.lock().unwrap().get(&format!("{split} {name}")).cloned().unwrap_or_default()
    }
}

impl MetricLogger for Recorder {
    fn log(&mut self, update: MetricsUpdate, _: usize, split: &Split) {
        for metric in update.entries_numeric {
            let name = format!("{split} {}", self.names[&metric.entry.metric_id]);
            self.values.lock().unwrap().entry(name).or_default().push(metric.numeric_entry.current());
        }
    }

    fn read_numeric(&mut self, _: &str, _: usize, _: &Split) -> Result<Vec<NumericEntry>, String> {
        Ok(Vec::new())
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name);
    }

    fn log_epoch_summary(&mut self, _: EpochSummary) {}
}

/// Keeps the progress that was shown of the training.
#[derive(Clone, Default)]
struct Progresses(Arc<Mutex<Vec<(usize, usize)>>>);

impl MetricsRendererTraining for Progresses {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
    fn render_train(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        let progress = item.progress.unwrap();
        self.0.lock().unwrap().push((progress.items_processed, progress.items_total));
    }
    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for Progresses {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Progresses {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// The learning rate of a step, counted from 1.
#[derive(Clone, Copy, Default)]
enum Schedule {
    /// 0.1 over the step.
    #[default]
    Harmonic,
    /// 1 at the start, 0 after ten steps.
    Linear,
    /// Nothing is learned.
    Zero,
}

/// A learning rate that tells how often it was asked for.
#[derive(Clone, Default)]
struct Falling {
    num_steps: usize,
    schedule: Schedule,
    /// Stops the training at that step.
    stops: Option<(usize, Interrupter)>,
}

impl LrScheduler for Falling {
    type Record<B: Backend> = usize;

    fn step(&mut self) -> f64 {
        self.num_steps += 1;
        if let Some((_, interrupter)) = self.stops.as_ref().filter(|(step, _)| *step == self.num_steps) {
            interrupter.stop(Some("as the test wants"));
        }
        match self.schedule {
            Schedule::Harmonic => 0.1 / self.num_steps as f64,
            Schedule::Linear => 1.0 - self.num_steps as f64 / 10.0,
            Schedule::Zero => 0.0,
        }
    }

    fn to_record<B: Backend>(&self) -> usize {
        self.num_steps
    }

    fn load_record<B: Backend>(self, num_steps: usize) -> Self {
        Self { num_steps, ..self }
    }
}

/// How a test differs from the plain case.
#[derive(Clone)]
struct Case {
    config: DataParallelConfig,
    shares: Shares,
    tail: Tail,
    num_workers: usize,
    accumulation_steps: usize,
    interrupted: Option<usize>,
    /// The rank that is interrupted in the midst of its optimizer step of this number.
    interrupted_at: Option<(usize, usize)>,
    /// Of Burn's own loaders, with batches of this size.
    plain: Option<usize>,
    /// What items weigh, in place of 1.
    counts: Option<fn(&usize) -> f64>,
    /// The loss is a mean over items weighted by class.
    weighs: bool,
    schedule: Schedule,
    train_items: Vec<usize>,
    valid_items: Vec<usize>,
    batch_size: usize,
    /// The model takes every item for one of class 0.
    is_constant: bool,
    /// The strategy does not know of the loaders.
    forgets_loaders: bool,
    /// The strategy knows another training loader than the training has.
    confuses_loaders: bool,
    /// The batch norm has the strategy's own communicator.
    shares_communicator: bool,
    /// Loaders are made without a word of ranks.
    forgets_ranks: bool,
    /// The model has a batch norm over the batches of all ranks.
    normalises: bool,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            config: DataParallelConfig::default(),
            shares: Shares::Equal,
            tail: Tail::Keep,
            num_workers: 0,
            accumulation_steps: 1,
            interrupted: None,
            interrupted_at: None,
            plain: None,
            counts: None,
            weighs: false,
            schedule: Schedule::default(),
            train_items: (0..NUM_TRAIN).collect(),
            valid_items: (0..NUM_VALID).collect(),
            batch_size: BATCH_SIZE,
            is_constant: false,
            forgets_loaders: false,
            confuses_loaders: false,
            shares_communicator: false,
            forgets_ranks: false,
            normalises: false,
        }
    }
}

#[derive(Default)]
struct Trained {
    recorder: Recorder,
    progresses: Progresses,
    parameters: Vec<f32>,
}

fn parameters<B: Backend>(model: &Mlp<B>) -> Vec<f32> {
    let Linear { weight, bias } = &model.hidden;
    let mut all: Vec<f32> = weight.val().into_data().iter().collect();
    all.extend(bias.as_ref().unwrap().val().into_data().iter::<f32>());
    all.extend(model.output.weight.val().into_data().iter::<f32>());
    all
}

fn plain<B: Backend>(num_items: usize, batch_size: usize) -> Arc<dyn DataLoader<B, Batch<B>>> {
    let dataset = InMemDataset::new((0..num_items).collect());
    DataLoaderBuilder::new(Points).batch_size(batch_size).build(dataset)
}

fn distributed<B: Backend>(
    case: &Case,
    items: &[usize],
    place: (usize, usize),
) -> DistributedDataLoader<B, usize, Batch<B>> {
    let builder = DistributedDataLoaderBuilder::new(Points);
    let builder = match case.counts {
        Some(counts) => builder.with_counts(counts),
        None => builder,
    };
    builder
        .batch_size(case.batch_size)
        .shares(case.shares.clone())
        .tail(case.tail)
        .num_workers(case.num_workers)
        .accumulation_steps(case.accumulation_steps)
        .rank(place.0, place.1)
        .build(InMemDataset::new(items.to_vec()))
        .unwrap()
}

/// One rank of a training, or the one device of Burn's own strategy.
fn train<Bk: HookBackend>(case: &Case, directory: &Path, device: &Bk::Device, rank: Option<DataParallel>) -> Trained {
    let trained = Trained::default();
    let place = rank.as_ref().map_or((0, 1), |rank| (rank.rank(), rank.world_size()));
    let loader_place = if case.forgets_ranks { (0, 1) } else { place };
    let train: Arc<dyn DataLoader<Bk, _>>;
    let valid: Arc<dyn DataLoader<Bk::InnerBackend, _>>;
    let mut rank = rank;
    match case.plain {
        Some(batch_size) => (train, valid) = (plain(NUM_TRAIN, batch_size), plain(NUM_VALID, BATCH_SIZE)),
        None => {
            let train_loader = distributed(case, &case.train_items, loader_place);
            let valid_loader =
                distributed(&Case { accumulation_steps: 1, ..case.clone() }, &case.valid_items, loader_place);
            if !case.forgets_loaders {
                rank = rank.map(|rank| rank.with_train_loader(&train_loader).with_valid_loader(&valid_loader));
            }
            let train_loader =
                if case.confuses_loaders { distributed(case, &case.train_items, loader_place) } else { train_loader };
            (train, valid) = (Arc::new(train_loader), Arc::new(valid_loader));
        }
    }
    let interrupter = Interrupter::new();
    if case.interrupted == Some(place.0) {
        interrupter.stop(Some("as the test wants"));
    }
    let training = SupervisedTraining::new(directory, train, valid)
        .metric_train_numeric(LossMetric::<Flex>::new())
        .metric_train_numeric(LearningRateMetric::new())
        .metric_valid_numeric(LossMetric::<Flex>::new())
        .metric_valid_numeric(AccuracyMetric::<Flex>::new())
        .metric_valid_numeric(AurocMetric::<Flex>::new())
        .with_file_checkpointer(CompactRecorder::new())
        .with_metric_logger(trained.recorder.clone())
        .renderer(trained.progresses.clone())
        .with_application_logger(None)
        .with_interrupter(interrupter.clone())
        .num_epochs(NUM_EPOCHS);
    let mut model = Mlp::<Bk>::new(device);
    model.weighs = case.weighs;
    if case.is_constant {
        model.output.weight = model.output.weight.map(|weight| Tensor::zeros_like(&weight).require_grad());
        model.output.bias = Some(Param::from_data([1.0, 0.0], device));
    }
    if case.normalises {
        let alone;
        let group = match rank.as_ref().and_then(DataParallel::process_group) {
            Some(group) => group,
            None => {
                alone = Arc::new(ProcessGroup::single().unwrap());
                &alone
            }
        };
        let own = group.new_communicator("batch_norm").unwrap();
        let layers = SyncGroup::new::<Bk>(if case.shares_communicator { group.communicator() } else { own });
        model.norm = Some(SyncBatchNorm::new(BatchNormConfig::new(8).init(device), &layers));
        rank = rank.map(|rank| rank.with_sync_group(&layers));
    }
    let stops = case.interrupted_at.filter(|(rank, _)| *rank == place.0).map(|(_, step)| (step, interrupter));
    let learner =
        Learner::new(model, SgdConfig::new().init(), Falling { num_steps: 0, schedule: case.schedule, stops });
    let training = match rank {
        Some(rank) => training.data_parallel(rank),
        None => training,
    };
    let result = training.launch(learner);
    Trained { parameters: parameters(&result.model), ..trained }
}

fn on_ranks(case: &Case, world_size: usize) -> Vec<Trained> {
    let directory = tempfile::tempdir().unwrap();
    run_groups(NonZeroUsize::new(world_size).unwrap(), Duration::from_secs(20), |group| {
        let rank = DataParallel::with_group(Arc::new(group), case.config.clone());
        train::<B>(case, directory.path(), &Default::default(), Some(rank))
    })
}

fn on_one_device(case: &Case) -> Trained {
    let directory = tempfile::tempdir().unwrap();
    train::<B>(case, directory.path(), &Default::default(), None)
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: {found:?} {expected:?}");
    for (found, expected) in found.iter().zip(expected) {
        // Sums in f32 in another order, twelve steps of them.
        assert!((found - expected).abs() < 1e-5, "{what}: {found} is not {expected}");
    }
}

const METRICS: [(&str, &str); 5] =
    [("train", "Loss"), ("train", "Learning Rate"), ("valid", "Loss"), ("valid", "Accuracy"), ("valid", "AUROC")];

/// All that rank 0 shows is what one device shows, and all ranks have the same model.
fn assert_same(ranks: &[Trained], one: &Trained) {
    for (split, name) in METRICS {
        let expected = one.recorder.of(split, name);
        assert!(!expected.is_empty(), "{split} {name}");
        let sorted = |mut values: Vec<f64>| {
            // Batches of Burn's own loaders come in turn from each rank.
            values.sort_by(f64::total_cmp);
            values
        };
        let found = ranks[0].recorder.of(split, name);
        match split {
            "valid" => assert_close(&sorted(found), &sorted(expected), name),
            _ => assert_close(&found, &expected, name),
        }
    }
    assert_eq!(*ranks[0].progresses.0.lock().unwrap(), *one.progresses.0.lock().unwrap());
    let wide = |values: &[f32]| values.iter().copied().map(f64::from).collect::<Vec<_>>();
    assert_close(&wide(&ranks[0].parameters), &wide(&one.parameters), "parameters");
    for rank in &ranks[1..] {
        assert_eq!(rank.parameters, ranks[0].parameters);
        assert!(rank.recorder.values.lock().unwrap().is_empty(), "only rank 0 shows metrics");
    }
}

#[test]
fn ranks_show_and_learn_what_one_device_does() {
    let one = on_one_device(&Case::default());
    for world_size in 1..=4 {
        assert_same(&on_ranks(&Case::default(), world_size), &one);
    }
}

#[test]
fn unequal_shares_and_loader_threads_change_nothing() {
    let one = on_one_device(&Case::default());
    for shares in [Shares::Weighted(vec![1, 3, 2]), Shares::Weighted(vec![0, 1, 1]), Shares::First(1)] {
        let case = Case { shares, num_workers: 2, ..Case::default() };
        assert_same(&on_ranks(&case, 3), &one);
    }
}

#[test]
fn ranks_without_items_stand_in_for_synchronised_batch_norm() {
    let one = on_one_device(&Case { normalises: true, ..Case::default() });
    // The first rank never has items; the last one has none of the last 4.
    for shares in [vec![0, 1, 1], vec![3, 1, 1, 1]] {
        let (world_size, shares) = (shares.len(), Shares::Weighted(shares));
        let case = Case { normalises: true, shares, ..Case::default() };
        let ranks = on_ranks(&case, world_size);
        assert_same(&ranks, &one);
    }
}

#[test]
fn a_loss_over_other_counts_than_items_goes_through_synchronised_batch_norm_with_its_weight() {
    let counts: fn(&usize) -> f64 = |item| f64::from(CLASS_WEIGHTS[class(item)]);
    let case = Case { normalises: true, weighs: true, counts: Some(counts), ..Case::default() };
    let one = on_one_device(&case);
    for world_size in [2, 3] {
        assert_same(&on_ranks(&case, world_size), &one);
    }
}

#[test]
fn each_rank_may_be_a_replica_of_several_members() {
    let one = on_one_device(&Case::default());
    let directory = tempfile::tempdir().unwrap();
    let ranks = each_rank(2, |communicator| {
        let device = ReplicaDevice::<Flex>::new([Default::default(), Default::default()]).unwrap();
        let rank = DataParallel::new(communicator, DataParallelConfig::default());
        train::<Autodiff<Replica<Flex>>>(&Case::default(), directory.path(), &device, Some(rank))
    });
    assert_same(&ranks, &one);
}

/// CASES 31
#[test]
fn the_scheduler_makes_one_step_per_optimizer_step_whatever_the_world_size() {
    for world_size in 1..=3 {
        let case = Case { accumulation_steps: 2, ..Case::default() };
        let ranks = on_ranks(&case, world_size);
        // 22 items are 4 micro steps of 6, and 2 windows.
        let expected: Vec<f64> = (1..=NUM_EPOCHS * 2).flat_map(|step| [0.1 / step as f64; 2]).collect();
        assert_close(&ranks[0].recorder.of("train", "Learning Rate"), &expected, "learning rate");
    }
}

#[test]
fn ranks_that_average_parameters_validate_and_end_with_one_model() {
    // An epoch has 4 windows.
    for interrupted_at in [None, Some((1, 1))] {
        let config = DataParallelConfig::default().with_average_every(NonZeroUsize::new(3));
        let ranks = on_ranks(&Case { config, interrupted_at, ..Case::default() }, 2);
        assert_eq!(ranks[0].parameters, ranks[1].parameters);
    }
}

/// CASES 31
#[test]
fn a_linear_schedule_of_four_ranks_does_not_fall_four_times_as_fast() {
    let ranks = on_ranks(&Case { schedule: Schedule::Linear, ..Case::default() }, 4);
    let rates = ranks[0].recorder.of("train", "Learning Rate");
    assert!((rates[2] - 0.7).abs() < 1e-9, "after 3 steps: {rates:?}");
}

/// CASES 46
#[test]
fn one_item_of_two_ranks_is_one_update_an_epoch() {
    let case = Case { train_items: vec![5], valid_items: vec![2], ..Case::default() };
    let (ranks, one) = (on_ranks(&case, 2), on_one_device(&case));
    assert_eq!(ranks[0].recorder.of("train", "Learning Rate"), [0.1, 0.1 / 2.0, 0.1 / 3.0]);
    assert_ne!(ranks[0].parameters, on_one_device(&Case { schedule: Schedule::Zero, ..case }).parameters);
    for rank in ranks {
        assert_eq!(rank.parameters, one.parameters);
    }
}

/// CASES 31
#[test]
fn the_scheduler_makes_no_step_where_nothing_counts() {
    // The first of 4 windows has the items 0 to 5.
    let counts: fn(&usize) -> f64 = |&item| if item < BATCH_SIZE { 0.0 } else { 1.0 };
    let ranks = on_ranks(&Case { counts: Some(counts), ..Case::default() }, 2);
    let rate = |step: usize| if step == 0 { 0.0 } else { 0.1 / step as f64 };
    let expected: Vec<f64> = (0..NUM_EPOCHS).flat_map(|epoch| (0..4).map(move |step| rate(epoch * 3 + step))).collect();
    assert_close(&ranks[0].recorder.of("train", "Learning Rate"), &expected, "learning rate");
}

/// CASES 17
#[test]
fn padded_duplicates_are_not_counted_in_metrics() {
    let one = on_one_device(&Case::default());
    let ranks = on_ranks(&Case { tail: Tail::Pad, ..Case::default() }, 4);
    let valid = |trained: &Trained| trained.progresses.0.lock().unwrap().last().copied();
    assert_eq!(valid(&ranks[0]), valid(&one));
    // Of one rank's items alone there would be other numbers; 14 validation items are 2 whole batches and 2 items.
    let found = ranks[0].recorder.of("valid", "Accuracy");
    assert_eq!(found.len(), NUM_EPOCHS * 3);
    for (index, accuracy) in found.iter().enumerate() {
        let num_items = if index % 3 == 2 { 2.0 } else { 6.0 };
        let num_right = accuracy / 100.0 * num_items;
        assert!((num_right - num_right.round()).abs() < 1e-6, "{accuracy} % of {num_items}");
    }
}

/// CASES 17
#[test]
fn an_accuracy_is_over_items_and_not_over_their_padded_duplicates() {
    // Of class 1 are the first two items, which also fill up the last batch.
    let valid_items = vec![2, 5, 0, 1, 3, 4, 6, 7, 9, 10];
    assert_eq!(valid_items.iter().map(class).sum::<usize>(), 2);
    let (is_constant, schedule, tail) = (true, Schedule::Zero, Tail::Pad);
    let case = Case { valid_items, batch_size: 3, is_constant, schedule, tail, ..Case::default() };
    let found = on_ranks(&case, 3)[0].recorder.of("valid", "Accuracy");
    let expected = [100.0 / 3.0, 100.0, 100.0, 100.0].repeat(NUM_EPOCHS);
    assert_close(&found, &expected, "with batches of 3, 3, 3 and 1 items an accuracy of 0.8 over 10");
}

#[test]
fn loaders_of_burn_give_each_rank_whole_batches_of_its_own_part() {
    // Ranks of 11 items each with batches of 3: the third and last window has 3 + 2 items of each rank.
    let case = Case { plain: Some(3), ..Case::default() };
    let ranks = on_ranks(&case, 2);
    assert_eq!(ranks[0].parameters, ranks[1].parameters);
    let progresses = ranks[0].progresses.0.lock().unwrap().clone();
    assert_eq!(progresses[..4], [(6, 22), (12, 22), (18, 22), (22, 22)]);
    assert_eq!(ranks[0].recorder.of("train", "Learning Rate").len(), NUM_EPOCHS * 4);
    // Validation is of the same batches as on one device.
    assert_eq!(ranks[0].recorder.of("valid", "AUROC").len(), NUM_EPOCHS * 3);
}

#[test]
fn ranks_without_items_take_part() {
    let case = Case { plain: Some(30), ..Case::default() };
    let one = on_one_device(&case);
    // 22 items on 4 ranks in batches of 30: one window, which together is the whole batch of one device.
    assert_same(&on_ranks(&case, 4), &one);
}

#[test]
fn one_interrupted_rank_stops_all_after_the_same_step() {
    for interrupted in 0..3 {
        let ranks = on_ranks(&Case { interrupted: Some(interrupted), ..Case::default() }, 3);
        assert_eq!(ranks[0].recorder.of("train", "Loss").len(), 1);
        assert_eq!(ranks[0].recorder.of("valid", "Loss").len(), 0);
        assert!(ranks.iter().all(|rank| rank.parameters == ranks[0].parameters));
    }
}

#[test]
fn a_rank_interrupted_after_the_last_window_of_an_epoch_does_not_stop_alone() {
    // An epoch has 4 windows. By the last one's optimizer step the ranks have agreed to go on with the validation.
    for interrupted in 0..3 {
        let ranks = on_ranks(&Case { interrupted_at: Some((interrupted, 4)), ..Case::default() }, 3);
        assert_eq!(ranks[0].recorder.of("train", "Loss").len(), 4);
        assert_eq!(ranks[0].recorder.of("valid", "Loss").len(), 1);
        assert!(ranks.iter().all(|rank| rank.parameters == ranks[0].parameters));
    }
}

#[test]
fn a_run_goes_on_from_the_checkpoint_that_rank_0_wrote() {
    let one = on_one_device(&Case::default());
    let directory = tempfile::tempdir().unwrap();
    let run = |num_epochs: usize, checkpoint: Option<usize>| {
        each_rank(2, |communicator| {
            let case = Case::default();
            let place = (communicator.rank(), communicator.world_size());
            let (train, valid) = (
                distributed::<B>(&case, &case.train_items, place),
                distributed::<Flex>(&case, &case.valid_items, place),
            );
            let rank = DataParallel::new(communicator, DataParallelConfig::default())
                .with_train_loader(&train)
                .with_valid_loader(&valid);
            let learner = Learner::new(Mlp::<B>::new(&Default::default()), SgdConfig::new().init(), Falling::default());
            let mut training = SupervisedTraining::new(directory.path(), Arc::new(train), Arc::new(valid))
                .metric_valid_numeric(LossMetric::<Flex>::new())
                .with_file_checkpointer(burn::record::DefaultRecorder::new())
                .with_metric_logger(Recorder::default())
                .renderer(Progresses::default())
                .with_application_logger(None)
                .num_epochs(num_epochs);
            if let Some(checkpoint) = checkpoint {
                training = training.checkpoint(checkpoint);
            }
            parameters(&training.data_parallel(rank).launch(learner).model)
        })
    };
    run(2, None);
    let resumed = run(NUM_EPOCHS, Some(2));
    assert_eq!(resumed[0], resumed[1]);
    for (found, expected) in resumed[0].iter().zip(&one.parameters) {
        assert!((found - expected).abs() < 1e-5, "{found} is not {expected}");
    }
}

fn message_of(case: Case) -> String {
    let panic = std::panic::catch_unwind(|| on_ranks(&case, 1)).err().expect("the settings cannot go together");
    panic.downcast_ref::<String>().expect("a text").clone()
}

#[test]
fn settings_that_cannot_go_together_name_what_to_do() {
    let accumulation = DataParallelConfig::default().with_accumulation_steps(NonZeroUsize::new(2).unwrap());
    let message = message_of(Case { config: accumulation, ..Case::default() });
    assert!(message.contains("accumulation_steps is 2"), "{message}");
    let auto = DataParallelConfig::default().with_balance(RankBalance::Auto);
    let message = message_of(Case { config: auto, plain: Some(3), ..Case::default() });
    assert!(message.contains("DistributedDataLoader"), "{message}");
    let auto = DataParallelConfig::default().with_balance(RankBalance::Auto);
    let message = message_of(Case { config: auto, normalises: true, ..Case::default() });
    assert!(message.contains("with_sync_group"), "{message}");
    let message = message_of(Case { shares_communicator: true, normalises: true, ..Case::default() });
    assert!(message.contains("new_communicator"), "{message}");
    let message = message_of(Case { confuses_loaders: true, ..Case::default() });
    assert!(message.contains("another loader"), "{message}");
}

#[test]
fn a_loader_made_without_ranks_does_not_give_every_rank_all_items() {
    let case = Case { forgets_ranks: true, ..Case::default() };
    let panic = std::panic::catch_unwind(|| on_ranks(&case, 2)).err().expect("the loader is for one rank");
    let message = panic.downcast_ref::<String>().expect("a text");
    assert!(message.contains("rank is 0 of 1") && message.contains("`.rank("), "{message}");
}

#[test]
fn settings_that_differ_between_ranks_are_an_error_on_every_rank_that_names_the_setting() {
    let directory = tempfile::tempdir().unwrap();
    let own = [Case::default(), Case { accumulation_steps: 2, ..Case::default() }];
    let buffers = DataParallelConfig::default().with_buffers(BufferSync::Off);
    let other = Case { config: buffers, ..Case::default() };
    for (cases, named) in [(&own, "training loader"), (&[Case::default(), other], "buffers")] {
        let messages = run_groups(NonZeroUsize::new(2).unwrap(), Duration::from_secs(20), |group| {
            let case = &cases[group.rank()];
            let rank = DataParallel::with_group(Arc::new(group), case.config.clone());
            let train = || train::<B>(case, directory.path(), &Default::default(), Some(rank));
            let panic = std::panic::catch_unwind(AssertUnwindSafe(train)).err().expect("the settings differ");
            panic.downcast_ref::<String>().expect("a text").clone()
        });
        for message in messages {
            assert!(message.contains(&format!("{named} of rank 1 is")), "{message}");
        }
    }
}

#[test]
fn a_loader_that_shares_out_batches_is_not_shared_out_again() {
    let case = Case { forgets_loaders: true, ..Case::default() };
    let panic = std::panic::catch_unwind(|| on_ranks(&case, 2)).err().expect("the strategy does not know");
    let message = panic.downcast_ref::<String>().expect("a text");
    assert!(message.contains("with_train_loader") || message.contains("its training panicked"), "{message}");
}

#[test]
fn shares_by_measured_speed_change_no_result() {
    let one = on_one_device(&Case::default());
    let config = DataParallelConfig::default().with_balance(RankBalance::Auto);
    assert_same(&on_ranks(&Case { config, ..Case::default() }, 2), &one);
}

#[test]
fn a_configuration_is_read_from_toml_and_json_and_names_what_is_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        DataParallelConfig::from_file(path)
    };
    let config = DataParallelConfig::default().with_accumulation_steps(NonZeroUsize::new(3).unwrap());
    let never = config.clone().with_check_every(None);
    for config in [config, never.clone(), never.with_average_every(NonZeroUsize::new(7))] {
        assert_eq!(file("a.toml", &config.to_string()).unwrap(), config);
        assert_eq!(file("a.json", &serde_json::to_string(&config).unwrap()).unwrap(), config);
    }
    let null = file("a.json", "{\"sync\": {\"check_every\": null}}").unwrap();
    assert_eq!(null, DataParallelConfig::default().with_check_every(None));
    for (name, text, problem) in [
        ("b.toml", "acumulation_steps = 3", "acumulation_steps"),
        ("b.json", "{\"buffers\": \"none\"}", "none"),
        ("b.txt", "", ".toml or .json"),
    ] {
        let error = file(name, text).unwrap_err().to_string();
        assert!(error.contains(problem) && error.contains(name), "{error}");
    }
    assert!(DataParallelConfig::from_file(directory.path().join("none.toml")).is_err());
}

#[test]
fn the_options_in_the_launch_page_are_read() {
    let page = include_str!("../../docs/LAUNCH.md");
    let (_, rest) = page.split_once("```toml\n").expect("an example");
    let (text, _) = rest.split_once("```").expect("its end");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("train.toml");
    std::fs::write(&path, text).unwrap();
    let config = DataParallelConfig::from_file(path).unwrap();
    let default = DataParallelConfig::default().group;
    assert_eq!(config.group.timeout, default.timeout, "the page shows the defaults");
    assert_eq!(config.group.rendezvous_timeout, default.rendezvous_timeout);
}
