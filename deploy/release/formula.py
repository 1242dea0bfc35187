"""A Homebrew formula of the sdist that was built, for a tap: dist/mlx-gateway.rb.

The sdist is fetched from the release that has it, by the hash of the file that lies in dist/. What
it needs comes as wheels, by the pins and hashes in it: mlx's own build of Metal kernels among
them, which Homebrew's rules for its own formulae (all from source) would not allow. Homebrew's
`mlx` is of whatever version it has, and the pins are what was tested. Its virtualenv helpers want
sdists and leave pip out, so a plain venv is made; and without preserve_rpath Homebrew would write
longer names into libraries of wheels that have no room for them.
"""

import hashlib
import sys
from pathlib import Path
from string import Template
from typing import Final

import gateway
from deploy.release.metadata import repository

DIST: Final = Path(__file__).parents[2] / "dist"
PYTHON: Final = "3.13"
FORMULA: Final = Template("""\
class MlxGateway < Formula
  desc "OpenAI-compatible gateway for MLX models"
  homepage "https://github.com/$repository"
  url "https://github.com/$repository/releases/download/v$version/$file"
  sha256 "$sha256"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@$python"

  preserve_rpath

  def install
    system Formula["python@$python"].opt_bin/"python$python", "-m", "venv", libexec
    pip = [libexec/"bin/python", "-m", "pip", "install", "--no-deps"]
    pins = ["-r", "requirements/bench.txt", "-r", "requirements/models.txt"]
    system(*pip, "--only-binary=:all:", "--require-hashes", *pins)
    system(*pip, buildpath)
    bin.install_symlink libexec/"bin/mlx-gateway"
  end

  def post_install
    (var/"mlx-gateway").mkpath
  end

  service do
    run [opt_bin/"mlx-gateway", "serve"]
    keep_alive successful_exit: false
    working_dir var/"mlx-gateway"
    log_path var/"log/mlx-gateway.log"
    error_log_path var/"log/mlx-gateway.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlx-gateway --version")
  end
end
""")


def main() -> None:
    """Write the formula; exit where the sdist or the repository's name is missing."""
    sdist = DIST / f"mlx_gateway-{gateway.__version__}.tar.gz"
    if not sdist.exists():
        sys.exit(f"{sdist.name} is not in dist/: make -C deploy/release dist builds it")
    name = repository()
    if not name:
        sys.exit("MLX_GATEWAY_REPOSITORY=owner/name says where the release will be")
    formula = DIST / "mlx-gateway.rb"
    formula.write_text(write(sdist, name), encoding="utf-8")
    print(formula)


def write(sdist: Path, name: str) -> str:
    """Return the formula for an sdist that a release of the repository has."""
    return FORMULA.substitute(
        repository=name,
        version=gateway.__version__,
        file=sdist.name,
        sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
        python=PYTHON,
    )


if __name__ == "__main__":
    main()
