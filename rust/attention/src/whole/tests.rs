//! The kernels of whole numbers against sums in 64 bits. A machine without the instructions skips them by name.

use super::digits::{self, CHUNK, CHUNK_BYTES, MOST, packed_words};
use super::{MOST_VALUES, sum::POSITIONS};
use crate::SPAN;
use crate::ahead::{Ahead, Load};
use crate::kernels::{InstructionSet, Kernels};
use crate::score::Score;
use crate::simd::avx512_vnni::Avx512Vnni;
use crate::softmax::{MOST_VECTORS, PackWeights};
use crate::sum::Sum;
use crate::view::Format;

/// No memory to ask for.
fn idle() -> Ahead {
    let mut ahead = Ahead::default();
    ahead.begin(0, 1, Load::FewRows);
    ahead
}

fn chosen(head_dim: usize, limit: InstructionSet) -> Kernels {
    Kernels::choose(Format::Bf16, Format::Int8, head_dim, limit)
}

/// The kernels of whole numbers, where the machine has them.
fn kernels() -> Option<Kernels> {
    let is_here = InstructionSet::detect() >= InstructionSet::Avx512Vnni;
    if !is_here {
        eprintln!("skipped: avx512_vnni");
    }
    is_here.then(|| chosen(64, InstructionSet::Avx512Vnni))
}

/// What a packed row of `count` numbers holds: the whole numbers and their step.
fn unpacked(row: &[u32], count: usize) -> (Vec<i64>, f32) {
    let bytes: Vec<i8> = row.iter().flat_map(|word| word.to_le_bytes()).map(|byte| byte as i8).collect();
    let whole = |place: usize| {
        let high = place / CHUNK * CHUNK_BYTES + place % CHUNK;
        256 * i64::from(bytes[high]) + i64::from(bytes[high + CHUNK])
    };
    // SAFETY: the row is as long as its tail needs.
    let (step, raised) = unsafe { digits::tail(row.as_ptr(), count) };
    let numbers: Vec<i64> = (0..count).map(whole).collect();
    if step.is_finite() {
        assert_eq!(i64::from(raised), (128 * numbers.iter().sum::<i64>()) as i32 as i64);
    }
    (numbers, step)
}

fn packed_query(kernels: &Kernels, numbers: &[f32]) -> Vec<u32> {
    let brains: Vec<u16> = numbers.iter().map(|&number| half::bf16::from_f32(number).to_bits()).collect();
    let mut row = vec![u32::MAX; packed_words(numbers.len())];
    // SAFETY: the query has so many numbers, and the row the words for them.
    unsafe {
        (kernels.pack_query)(brains.as_ptr().cast(), Format::Bf16, numbers.len(), row.as_mut_ptr());
    }
    row
}

fn packed_weights(numbers: &[f32; SPAN]) -> (Vec<u32>, f32) {
    use crate::simd::Simd;
    let mut row = vec![u32::MAX; packed_words(SPAN)];
    // SAFETY: this is called where the instructions were detected, and the row has the words.
    unsafe {
        let unit = Avx512Vnni::assume();
        let mut weights = [unit.splat(f32::NAN); MOST_VECTORS];
        for (place, weights) in weights.iter_mut().enumerate().take(SPAN / Avx512Vnni::LANES) {
            *weights = unit.load(numbers[place * Avx512Vnni::LANES..].as_ptr());
        }
        let total = unit.pack_weights(row.as_mut_ptr(), &weights);
        (row, total)
    }
}

/// Numbers of both signs, exact in bf16.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|place| (((place * 37 + seed * 61 + place * place) % 255) as f32 - 127.0) / 8.0).collect()
}

fn bytes(count: usize, seed: usize) -> Vec<i8> {
    (0..count).map(|place| (place * 89 + seed * 57 + place / 7) as u8 as i8).collect()
}

/// What makes the largest sums of either sign.
fn extremes(count: usize) -> [(Vec<f32>, i8); 4] {
    [(1.0, 127), (1.0, -128), (-1.0, 127), (-1.0, -128)].map(|(number, byte)| (vec![number; count], byte))
}

#[test]
fn other_machines_and_long_rows_fall_back() {
    for limit in [
        InstructionSet::Portable,
        InstructionSet::Avx2,
        InstructionSet::Avx512,
        InstructionSet::Avx512Bf16,
        InstructionSet::Avx512Vnni,
    ] {
        let is_whole = |head_dim| chosen(head_dim, limit).many_rows.is_none();
        let set = limit.min(InstructionSet::detect());
        assert_eq!(is_whole(MOST_VALUES), set == InstructionSet::Avx512Vnni, "{}", limit.name());
        assert!(!is_whole(MOST_VALUES + 1), "{}", limit.name());
        for (query, cache) in [
            (Format::F32, Format::Int8),
            (Format::F16, Format::Int8),
            (Format::Bf16, Format::Fp8),
            (Format::Bf16, Format::Bf16),
        ] {
            assert!(Kernels::choose(query, cache, 64, limit).many_rows.is_some(), "{query:?} {cache:?}");
        }
    }
}

#[test]
fn numbers_are_rounded_to_the_nearest_step() {
    let Some(kernels) = kernels() else { return };
    for count in [1, 15, 16, 17, 63, 64, 65, 80, 128, 512] {
        for scale in [1.0, 2f32.powi(100), 2f32.powi(-90)] {
            let wanted: Vec<f32> = numbers(count, count).iter().map(|number| number * scale).collect();
            let (whole, step) = unpacked(&packed_query(&kernels, &wanted), count);
            let largest = wanted.iter().fold(0f32, |most, number| most.max(number.abs()));
            assert!((step * MOST as f32 / largest - 1.0).abs() < 1e-6);
            assert_eq!(whole.iter().map(|whole| whole.abs()).max(), Some(i64::from(MOST)));
            for (whole, wanted) in whole.iter().zip(&wanted) {
                let error = (*whole as f64 * f64::from(step) - f64::from(*wanted)).abs();
                assert!(error <= f64::from(step) * 0.502, "{wanted} became {whole} times {step}");
            }
        }
    }
}

#[test]
fn weights_are_packed_and_summed_as_they_were_rounded() {
    let Some(_) = kernels() else { return };
    for seed in 0..8 {
        let weights: [f32; SPAN] =
            std::array::from_fn(|place| 2f32.powi(-((place * 7 + seed) as i32 % 23)) * 0.77);
        let (row, total) = packed_weights(&weights);
        let (whole, step) = unpacked(&row, SPAN);
        assert_eq!(total, whole.iter().sum::<i64>() as f32 * step);
        for (whole, weight) in whole.iter().zip(weights) {
            assert!((*whole as f32 * step - weight).abs() <= step * 0.502);
        }
    }
}

#[test]
fn rows_of_zeros_tiny_numbers_and_none() {
    let Some(kernels) = kernels() else { return };
    for tiny in [0.0, -0.0, 1e-40, -3e-36, 7e-34, 1e-33] {
        let wanted = half::bf16::from_f32(tiny).to_f32();
        let (whole, step) = unpacked(&packed_query(&kernels, &[tiny; 80]), 80);
        let error = (whole[79] as f32 * step - wanted).abs();
        assert!(step.is_normal() && error <= step * 0.502, "{tiny} became {} times {step}", whole[79]);
    }
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
        let mut query = numbers(80, 3);
        query[70] = bad;
        let (_, step) = unpacked(&packed_query(&kernels, &query), 80);
        assert!(step.is_nan());
        let mut weights = [0.5; SPAN];
        weights[9] = bad;
        assert!(packed_weights(&weights).1.is_nan());
    }
}

/// Scores rows of queries over keys and compares them with sums in 64 bits.
fn check_scores(kernels: &Kernels, queries: &[Vec<f32>], keys: &[i8], head_dim: usize) {
    let zeros = vec![0i8; head_dim];
    // The last position is not read.
    let key = |position: usize| {
        if position + 1 < SPAN { &keys[position * head_dim..][..head_dim] } else { &zeros[..] }
    };
    let rows: [*const u8; SPAN] = std::array::from_fn(|position| key(position).as_ptr().cast());
    let packed: Vec<Vec<u32>> = queries.iter().map(|query| packed_query(kernels, query)).collect();
    let words = packed_words(head_dim);
    let mut scratch = vec![f32::NAN; head_dim.div_ceil(CHUNK) * CHUNK / 4 * kernels.scored_keys];
    let mut scores = vec![f32::NAN; queries.len() * SPAN];
    let queries = packed.concat();
    let job = Score {
        rows: &rows,
        head_dim,
        keys: scratch.as_mut_ptr(),
        queries: queries.as_ptr(),
        queries_stride: words,
        scores: scores.as_mut_ptr(),
        num_rows: packed.len(),
    };
    // SAFETY: the keys and the vectors have the sizes that the job names.
    unsafe { (kernels.score)(&job, &mut idle()) };
    for (row, scores) in packed.iter().zip(scores.chunks(SPAN)) {
        let (whole, step) = unpacked(row, head_dim);
        for (position, score) in scores.iter().enumerate() {
            let products = whole.iter().zip(key(position)).map(|(whole, &key)| whole * i64::from(key));
            assert_eq!(*score, products.sum::<i64>() as f32 * step, "{head_dim} values, position {position}");
        }
    }
}

#[test]
fn scores_are_exact() {
    let Some(kernels) = kernels() else { return };
    for head_dim in [1, 4, 17, 63, 64, 65, 80, 128, 192, 256, 511, 512] {
        for num_rows in [1, 2, 3, 4, 5, 6, 7, 13] {
            let queries: Vec<Vec<f32>> = (0..num_rows).map(|row| numbers(head_dim, row)).collect();
            check_scores(&kernels, &queries, &bytes(SPAN * head_dim, num_rows), head_dim);
        }
        for (query, byte) in extremes(head_dim) {
            check_scores(&kernels, &[query], &vec![byte; SPAN * head_dim], head_dim);
        }
    }
}

/// Sums values by rows of weights and compares them with sums in 64 bits.
fn check_sums(kernels: &Kernels, weights: &[[f32; SPAN]], values: &[i8], head_dim: usize, seen: [usize; 2]) {
    let rows: [*const u8; SPAN] =
        std::array::from_fn(|position| values[position * head_dim..][..head_dim].as_ptr().cast());
    let packed: Vec<Vec<u32>> = weights.iter().map(|weights| packed_weights(weights).0).collect();
    let stride = head_dim.div_ceil(CHUNK) * CHUNK;
    let old: Vec<f32> = (0..weights.len() * stride).map(|place| place as f32 / 8.0).collect();
    let factors: Vec<f32> = (0..weights.len()).map(|row| 0.5 / (row + 1) as f32).collect();
    let mut sums = old.clone();
    let words = packed.concat();
    let job = Sum {
        rows: &rows,
        head_dim,
        weights: words.as_ptr(),
        sums: sums.as_mut_ptr(),
        sums_stride: stride,
        factors: factors.as_ptr(),
        num_rows: weights.len(),
        first_step: seen[0] / POSITIONS,
        end_step: seen[1].div_ceil(POSITIONS),
    };
    // SAFETY: the values and the vectors have the sizes that the job names.
    unsafe { (kernels.sum)(&job, &mut idle()) };
    for (row, packed) in packed.iter().enumerate() {
        let (whole, step) = unpacked(packed, SPAN);
        for column in 0..head_dim {
            let value = |position: usize| i64::from(values[position * head_dim + column]);
            let products = (0..SPAN).map(|position| whole[position] * value(position));
            let place = row * stride + column;
            let wanted = (products.sum::<i64>() as f32).mul_add(step, old[place] * factors[row]);
            assert_eq!(sums[place], wanted, "row {row}, column {column} of {head_dim}");
        }
    }
}

#[test]
fn weighted_sums_are_exact() {
    let Some(kernels) = kernels() else { return };
    for head_dim in [1, 17, 63, 64, 65, 80, 128, 320] {
        for (num_rows, seen) in [
            (1, [0, 64]),
            (2, [0, 1]),
            (3, [3, 64]),
            (4, [7, 50]),
            (5, [63, 64]),
            (6, [0, 64]),
            (13, [13, 17]),
        ] {
            let weights: Vec<[f32; SPAN]> = (0..num_rows)
                .map(|row| {
                    let all = numbers(SPAN, row);
                    std::array::from_fn(
                        |place| if (seen[0]..seen[1]).contains(&place) { all[place] } else { 0.0 },
                    )
                })
                .collect();
            check_sums(&kernels, &weights, &bytes(SPAN * head_dim, num_rows), head_dim, seen);
        }
        for (weights, byte) in extremes(SPAN) {
            let weights = [weights.try_into().unwrap()];
            check_sums(&kernels, &weights, &vec![byte; SPAN * head_dim], head_dim, [0, SPAN]);
        }
    }
}
