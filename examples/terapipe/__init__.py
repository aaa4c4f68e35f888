"""TeraPipe's experiments (ICML 2021, arXiv 2102.07988), priced by the product's cost model."""
