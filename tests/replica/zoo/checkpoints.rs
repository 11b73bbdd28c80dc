//! Models that move: between devices, between threads, through records, and with statistics of their own.

use std::thread;

use bonfire::{Replica, ReplicaDevice};
use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module},
    nn::{
        BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, Relu,
        conv::{Conv2d, Conv2dConfig},
        loss::CrossEntropyLossConfig,
    },
    optim::{AdamConfig, GradientsParams, Optimizer, adaptor::OptimizerAdaptor},
    record::{BinBytesRecorder, FullPrecisionSettings, Recorder},
    tensor::{
        ElementConversion, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_flex::{Flex, FlexDevice};

use super::{
    super::runs::{ALWAYS, draw_alone, replica},
    data::{floats, ints},
    journal::values,
    parity::assert_near,
};

type B = Replica<Flex>;
type Ad = Autodiff<B>;

/// Convolution, BatchNorm, linear: with parameters and running statistics.
#[derive(Module, Debug)]
struct Cnn<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
    relu: Relu,
    output: Linear<B>,
}

impl<B: Backend> Cnn<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            conv: Conv2dConfig::new([1, 4], [3, 3]).with_bias(false).init(device),
            norm: BatchNormConfig::new(4).init(device),
            relu: Relu::new(),
            output: LinearConfig::new(4 * 4 * 4, 5).init(device),
        }
    }

    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        let x = self.relu.forward(self.norm.forward(self.conv.forward(images)));
        self.output.forward(x.flatten(1, 3))
    }
}

/// A model in training.
struct Training<B: AutodiffBackend> {
    model: Cnn<B>,
    optimizer: OptimizerAdaptor<burn::optim::Adam, Cnn<B>, B>,
}

impl<B: AutodiffBackend> Training<B> {
    fn new(device: &B::Device) -> Self {
        B::seed(device, 5);
        Self { model: Cnn::new(device), optimizer: AdamConfig::new().init() }
    }

    /// The losses of some steps on `device`.
    fn steps(mut self, steps: std::ops::Range<u64>, device: &B::Device) -> (Self, Vec<f64>) {
        let loss_fn = CrossEntropyLossConfig::new().init(device);
        let losses = steps.map(|step| {
            let images = floats::<B, 4>(step, [8, 1, 6, 6], device);
            let loss = loss_fn.forward(self.model.forward(images), ints(step, [8], 5, device));
            let grads = GradientsParams::from_grads(loss.backward(), &self.model);
            self.model = self.optimizer.step(1e-3, self.model.clone(), grads);
            loss.into_scalar().elem()
        });
        let losses = losses.collect();
        (self, losses)
    }

    /// The records of the model and of the optimizer.
    fn save(&self) -> [Vec<u8>; 2] {
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        let model = Recorder::<B>::record(&recorder, self.model.clone().into_record(), ()).unwrap();
        [model, Recorder::<B>::record(&recorder, self.optimizer.to_record(), ()).unwrap()]
    }

    fn load([model, optimizer]: [Vec<u8>; 2], device: &B::Device) -> Self {
        let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
        let load_model = || Recorder::<B>::load(&recorder, model, device).unwrap();
        let fresh = AdamConfig::new().init();
        Self {
            model: Cnn::new(device).load_record(load_model()),
            optimizer: fresh.load_record(Recorder::<B>::load(&recorder, optimizer, device).unwrap()),
        }
    }
}

#[test]
fn a_checkpoint_of_one_device_goes_on_on_a_replica_and_back() {
    let _alone = draw_alone();
    let (plain, _) = Training::<Autodiff<Flex>>::new(&FlexDevice).steps(0..5, &FlexDevice);
    let saved = plain.save();
    let (plain, expected) = plain.steps(5..15, &FlexDevice);
    for num_members in 1..=4 {
        let device = replica::<Flex>(num_members, ALWAYS);
        let (there, mut losses) = Training::<Ad>::load(saved.clone(), &device).steps(5..10, &device);
        let (back, rest) = Training::<Autodiff<Flex>>::load(there.save(), &FlexDevice).steps(10..15, &FlexDevice);
        losses.extend(rest);
        assert_near(&losses, &expected, 1e-5, 1.0, &format!("losses, {num_members} members"));
        for (index, (ours, theirs)) in values(&back.model).iter().zip(&values(&plain.model)).enumerate() {
            // Adam: entries whose gradient is nearly zero take steps of full length.
            assert_near(ours, theirs, 1e-4, 0.1, &format!("parameter {index}, {num_members} members"));
        }
    }
}

#[test]
fn a_model_moved_or_forked_to_another_replica_goes_on_there() {
    let _alone = draw_alone();
    for num_members in 1..=4 {
        let [home, other] = [(); 2].map(|()| replica::<Flex>(num_members, ALWAYS));
        let (here, _) = Training::<Ad>::new(&home).steps(0..3, &home);
        let (stayed, expected) = Training::<Ad>::load(here.save(), &home).steps(3..6, &home);
        // Burn's running statistics are shared by a model and its clones: what moves is loaded apart.
        let Training { model, optimizer } = Training::<Ad>::load(here.save(), &home);
        let model = model.fork(&other);
        assert_eq!(model.devices(), vec![other.clone()]);
        let (moved, losses) = Training { model, optimizer }.steps(3..6, &other);
        // The same number of members: the same sums, to the last bit.
        assert_eq!(losses, expected, "{num_members} members");
        assert_eq!(values(&moved.model), values(&stayed.model), "{num_members} members");
        // Moved by `to_device`, parameters stay in the graph of those they come from: that is for inference.
        let images = |device| floats::<B, 4>(9, [8, 1, 6, 6], device);
        let inferred = moved.model.valid().forward(images(&other)).into_data();
        let returned = moved.model.valid().to_device(&home);
        assert_eq!(returned.devices(), vec![home.clone()]);
        assert_eq!(returned.forward(images(&home)).into_data(), inferred);
        assert_eq!(values(&returned), values(&moved.model.valid()));
    }
}

/// CASES 14. Each member infers the same item, with its own copy of the statistics.
#[test]
fn running_statistics_are_the_same_on_every_member_and_in_a_checkpoint() {
    let _alone = draw_alone();
    for num_members in 1..=4 {
        let device = replica::<Flex>(num_members, ALWAYS);
        let (training, _) = Training::<Ad>::new(&device).steps(0..3, &device);
        let item = floats::<B, 4>(42, [1, 1, 6, 6], &device);
        let infer = |model: &Cnn<B>| {
            let items = item.clone().repeat_dim(0, num_members);
            let rows: Vec<f32> = model.forward(items).into_data().to_vec().unwrap();
            rows.chunks(5).map(<[f32]>::to_vec).collect::<Vec<_>>()
        };
        let model = training.model.valid();
        let rows = infer(&model);
        assert_eq!(rows.len(), num_members);
        assert!(rows.iter().all(|row| *row == rows[0] && row.iter().all(|x| x.is_finite())), "{rows:?}");
        let loaded = Training::<Ad>::load(training.save(), &device).model.valid();
        let untrained = Training::<Ad>::new(&device).model.valid();
        assert_ne!(infer(&untrained), rows);
        for _ in 0..100 {
            assert_eq!(infer(&model), rows);
            assert_eq!(infer(&loaded), rows);
        }
    }
}

/// The statistics themselves are those of one device, of the whole batch.
#[test]
fn running_statistics_are_those_of_one_device() {
    let _alone = draw_alone();
    fn statistics<B: AutodiffBackend>(device: &B::Device) -> Vec<f64> {
        let (training, _) = Training::<B>::new(device).steps(0..3, device);
        let norm = training.model.valid().norm;
        let [mean, variance] = [norm.running_mean, norm.running_var].map(|state| state.value_sync().into_data());
        mean.iter::<f64>().chain(variance.iter::<f64>()).collect()
    }
    let expected = statistics::<Autodiff<Flex>>(&FlexDevice);
    assert!(expected[..4].iter().all(|mean| *mean != 0.0) && expected[4..].iter().all(|variance| *variance != 1.0));
    for num_members in 1..=4 {
        let found = statistics::<Ad>(&replica(num_members, ALWAYS));
        assert_near(&found, &expected, 1e-5, 0.1, &format!("{num_members} members"));
    }
}

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    hidden: Linear<B>,
    norm: LayerNorm<B>,
    output: Linear<B>,
}

/// CASES 47, with modules and an optimizer. Each thread has a model of its own: Burn's autodiff can deadlock when threads
/// train clones of one model with running statistics.
#[test]
fn models_trained_on_several_threads_are_those_trained_one_after_the_other() {
    let _alone = draw_alone();
    let device = replica::<Flex>(2, ALWAYS);
    let draw = |seed| {
        B::seed(&device, seed);
        let model: Mlp<Ad> = Mlp {
            hidden: LinearConfig::new(6, 8).init(&device),
            norm: LayerNormConfig::new(8).init(&device),
            output: LinearConfig::new(8, 3).init(&device),
        };
        // Parameters are drawn when they are first used: here and now.
        assert_eq!(values(&model).len(), 6);
        model
    };
    fn run(mut model: Mlp<Ad>, seed: u64, device: &ReplicaDevice<Flex>) -> (Vec<f64>, Vec<Vec<f64>>) {
        let loss_fn = CrossEntropyLossConfig::new().init(device);
        let mut optimizer = AdamConfig::new().init();
        let mut losses = vec![];
        for step in 0..300 {
            let x = model.hidden.forward(floats(seed * 1000 + step, [8, 6], device));
            let logits = model.output.forward(model.norm.forward(x));
            let loss = loss_fn.forward(logits, ints(step, [8], 3, device));
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-3, model, grads);
            losses.push(loss.into_scalar().elem());
        }
        (losses, values(&model))
    }
    let models: Vec<_> = (0..4).map(draw).collect();
    let alone: Vec<_> = (models.iter().zip(0..)).map(|(model, seed)| run(model.clone(), seed, &device)).collect();
    let together: Vec<_> = thread::scope(|scope| {
        let device = &device;
        let start = |(model, seed)| scope.spawn(move || run(model, seed, device));
        let threads: Vec<_> = models.into_iter().zip(0..).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(alone == together, "losses or parameters differ");
    assert_ne!(alone[0], alone[1]);
}
