//! Patterns for paths and command lines.

use std::fmt;

/// A pattern: `?` is one character and `*` any number of them, but no `/`; `**` is any number of characters, with
/// `/` too. In [`Glob::text`] patterns `*` is any number of any characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob {
    pattern: String,
    parts: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// This character.
    Is(char),
    /// One character, no slash.
    One,
    /// Any number of characters, no slash.
    Some,
    /// Any number of any characters.
    All,
}

impl Glob {
    /// A pattern for paths, where `*` does not reach over a slash.
    pub fn path(pattern: &str) -> Self {
        Self::new(pattern, Part::Some)
    }

    /// A pattern for text that is no path.
    pub fn text(pattern: &str) -> Self {
        Self::new(pattern, Part::All)
    }

    fn new(pattern: &str, star: Part) -> Self {
        let mut parts = Vec::new();
        for c in pattern.chars() {
            let part = match c {
                '?' => Part::One,
                '*' => star,
                c => Part::Is(c),
            };
            match (parts.last_mut(), part) {
                (Some(last @ (Part::Some | Part::All)), Part::Some | Part::All) => {
                    *last = Part::All
                }
                _ => parts.push(part),
            }
        }
        Self {
            pattern: pattern.to_owned(),
            parts,
        }
    }

    /// The pattern that only `text` matches, if there is one: a `*` or `?` cannot be taken literally.
    pub fn only(text: &str) -> Option<Self> {
        (!text.contains(['*', '?'])).then(|| Self::path(text))
    }

    /// True if all of `text` matches. The time is at most the product of both lengths.
    pub fn matches(&self, text: &str) -> bool {
        // Which positions in the pattern the text up to here can have reached.
        let mut reached = vec![false; self.parts.len() + 1];
        reached[0] = true;
        self.step_over_stars(&mut reached);
        for c in text.chars() {
            let mut next = vec![false; reached.len()];
            for (at, _) in reached.iter().enumerate().filter(|&(_, &is)| is) {
                match self.parts.get(at) {
                    Some(&Part::Is(wanted)) if wanted == c => next[at + 1] = true,
                    Some(Part::One) if c != '/' => next[at + 1] = true,
                    Some(Part::Some) if c != '/' => next[at] = true,
                    Some(Part::All) => next[at] = true,
                    _ => {}
                }
            }
            self.step_over_stars(&mut next);
            reached = next;
        }
        reached[self.parts.len()]
    }

    fn step_over_stars(&self, reached: &mut [bool]) {
        for (at, part) in self.parts.iter().enumerate() {
            if reached[at] && matches!(part, Part::Some | Part::All) {
                reached[at + 1] = true;
            }
        }
    }
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.pattern)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stop_at_slashes_unless_doubled() {
        for (pattern, text, expected) in [
            ("/usr/bin/curl", "/usr/bin/curl", true),
            ("/usr/bin/curl", "/usr/bin/curl2", false),
            ("/usr/bin/*", "/usr/bin/curl", true),
            ("/usr/*", "/usr/bin/curl", false),
            ("/usr/**", "/usr/bin/curl", true),
            ("/usr/**/curl", "/usr/local/bin/curl", true),
            ("/usr/b?n/curl", "/usr/bin/curl", true),
            ("/usr?bin/curl", "/usr/bin/curl", false),
            ("**", "", true),
            ("*", "", true),
            ("?", "", false),
            ("", "", true),
            ("", "a", false),
            ("*a*b*c*", "xaybzc", true),
            ("*a*b*c*", "xaybz", false),
        ] {
            assert_eq!(
                Glob::path(pattern).matches(text),
                expected,
                "{pattern} on {text}"
            );
        }
        assert!(Glob::text("curl * https://*").matches("curl -s https://example.org/a"));
    }

    #[test]
    fn no_pattern_takes_exponential_time() {
        let pattern = "*a".repeat(500);
        let began = std::time::Instant::now();
        assert!(!Glob::path(&pattern).matches(&"a".repeat(499)));
        assert!(began.elapsed().as_secs() < 5);
    }
}
