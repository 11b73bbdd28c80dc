//! Ranks of which each is a replica of several members.

use std::sync::Arc;

use bonfire::{
    Replica, ReplicaDevice, ReplicaOptions, Spread,
    collectives::Communicator,
    train::{SyncOptions, TrainingStep},
};
use bonfire_tests::images::LeNet;
use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    nn::loss::CrossEntropyLossConfig,
    optim::{GradientsParams, Optimizer, SgdConfig},
    record::{FullPrecisionSettings, Recorder},
    tensor::{Int, Tensor, TensorData, backend::AutodiffBackend},
};
use burn_flex::{Flex, FlexDevice};

use crate::step::each_rank;

const NUM_STEPS: usize = 5;
const SIDE: usize = 16;

/// A global batch of 12 items, of which these are a rank's.
fn gradients<B: AutodiffBackend>(
    model: &LeNet<B>,
    items: core::ops::Range<usize>,
    device: &B::Device,
) -> GradientsParams {
    let (num, pixels) = (items.len(), SIDE * SIDE);
    let images: Vec<f32> =
        (items.start * pixels..items.end * pixels).map(|i| ((i * 31 + i / 7) % 255) as f32 / 255.0 - 0.5).collect();
    let classes: Vec<i32> = items.map(|item| (item * 3 % 10) as i32).collect();
    let images = Tensor::from_data(TensorData::new(images, [num, 1, SIDE, SIDE]), device);
    let classes = Tensor::<B, 1, Int>::from_data(TensorData::new(classes, [num]), device);
    let loss = CrossEntropyLossConfig::new().init(device).forward(model.forward(images), classes);
    GradientsParams::from_grads(loss.backward(), model)
}

fn values<B: AutodiffBackend>(model: &LeNet<B>) -> Vec<f32> {
    struct Read(Vec<f32>);
    impl<B: AutodiffBackend> ModuleVisitor<B> for Read {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut read = Read(Vec::new());
    model.visit(&mut read);
    read.0
}

#[test]
fn ranks_of_two_members_each_equal_one_device() {
    type One = Autodiff<Flex>;
    type Many = Autodiff<Replica<Flex>>;
    let recorder = burn::record::BinBytesRecorder::<FullPrecisionSettings>::new();
    let mut model = LeNet::<One>::new(SIDE, &FlexDevice);
    let first: Vec<u8> = recorder.record(model.clone().into_record(), ()).unwrap();
    model = model.load_record(recorder.load(first.clone(), &FlexDevice).unwrap());
    let mut optimizer = SgdConfig::new().init();
    for _ in 0..NUM_STEPS {
        let gradients = gradients(&model, 0..12, &FlexDevice);
        model = optimizer.step(0.1, model, gradients);
    }
    let expected = values(&model);

    let found = each_rank(2, |communicator| {
        let rank = communicator.rank();
        let options = ReplicaOptions { spread: Spread::OnHeavyOp { min_work: 1 }, ..ReplicaOptions::default() };
        let device = ReplicaDevice::with_options(vec![FlexDevice; 2], options).unwrap();
        let mut model = LeNet::<Many>::new(SIDE, &device);
        if rank == 0 {
            model = model.load_record(recorder.load(first.clone(), &device).unwrap());
        }
        let communicator: Arc<dyn Communicator> = communicator;
        let mut step = TrainingStep::<Many>::new(communicator, &model, SyncOptions::default()).unwrap();
        let mut model = step.synchronise(model).unwrap();
        let mut optimizer = SgdConfig::new().init();
        for _ in 0..NUM_STEPS {
            let items = if rank == 0 { 0..7 } else { 7..12 };
            step.micro_step(gradients(&model, items.clone(), &device), items.len() as f64).unwrap();
            let window = step.finish().unwrap().unwrap();
            model = step.settle(optimizer.step(0.1, model, window.gradients)).unwrap();
        }
        values(&model)
    });
    assert!(found[0] == found[1], "bitwise equal ranks");
    let square = |value: f32| f64::from(value).powi(2);
    let difference: f64 = found[0].iter().zip(&expected).map(|(found, expected)| square(found - expected)).sum();
    let distance = (difference / expected.iter().copied().map(square).sum::<f64>()).sqrt();
    // Sums are made in another order than on one device.
    assert!(distance < 1e-5, "{distance}");
}
