//! Middles and spreads.

/// The value below which this part of all values lie, in percent.
pub(crate) fn percentile<T: Copy>(sorted: &[T], part: usize) -> T {
    sorted[(sorted.len() * part / 100).min(sorted.len() - 1)]
}

/// The middle of several rounds, and how far they lie apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Of one round or more.
    pub(crate) fn of(rounds: impl IntoIterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = rounds.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
            _ => sorted[middle],
        };
        Self { median, min: sorted[0], max: sorted[sorted.len() - 1] }
    }
}

/// Random enough to draw keys and orders from, and the same for the same seed.
#[derive(Clone, Debug)]
pub(crate) struct SplitMix(pub(crate) u64);

impl SplitMix {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_two() {
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 9.0]), Spread { median: 3.0, min: 1.0, max: 9.0 });
        assert_eq!(Spread::of([4.0, 1.0, 2.0]).median, 2.0);
    }

    #[test]
    fn a_percentile_is_one_of_the_values() {
        let values: Vec<u32> = (1..=200).collect();
        assert_eq!((percentile(&values, 50), percentile(&values, 99)), (101, 199));
        assert_eq!(percentile(&[7], 99), 7);
    }

    #[test]
    fn a_shuffle_loses_nothing() {
        let mut items: Vec<u32> = (0..50).collect();
        SplitMix(1).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
